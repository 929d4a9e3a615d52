"""What a GPU has to show, next to what was measured: a table from the files of gpu_all.sh.

    python benchmarks/gpu_goals.py FOLDER [--json FILE]

What did not run is "not measured". The JSON is a question of docs_page.py. SDPA: the fastest of its
kernels; a provider that comes nearer to it than the op is named with its figure. fp8: in the same
decodes. Weights: layers with one row. Engines: of 1 B, then of 8 B. Shares: attention, linear
layers, sampling, host.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

NOTHING = "not measured"
PREFILLS = ["prefill 1 x 2k", "prefill 1 x 8k", "prefill 1 x 32k", "chunk 2k on 30k"]
DECODES = ["decode 1 x 8k", "decode 16 x 1k", "decode 64 x 1k", "decode 256 x 1k"]
MODELS = ["1b", "8b"]
KINDS = ["attention", "linear", "sampling", "host"]
TOOLS = ["memcheck", "racecheck", "initcheck"]
Rows = list[dict[str, Any]]


PROVIDED = ["providers", "descriptors", "specialized"]


def over_sdpa(seconds: Mapping[str, float], name: str = "op") -> float:
    """Speed of a kernel over the fastest SDPA."""
    return min(each for name, each in seconds.items() if name.startswith("sdpa")) / seconds[name]


def table(folder: Path) -> dict[str, tuple[str, str]]:
    """The goal and the figures of each row."""
    cases = _by(_part(folder, "attention"), "case")
    provided = _provided(folder)
    codes = _by(_part(folder, "codes"), "case")
    layers = [each for rows in _part(folder, "weights") for each in rows if each["rows"] == 1]
    models = _by(_part(folder, "engines"), "model")
    tools = {each["tool"]: each for each in _read(folder / "gpu_sanitizer.json", "sanitizer")}
    return {
        "prefill over SDPA: 2k, 8k, 32k, 2k on 30k": (
            "0.9",
            _list(PREFILLS, cases, lambda row: _prefill(row, provided.get(row["case"], {}))),
        ),
        "decode over copy: 1x8k, 16x1k, 64x1k, 256x1k": (
            "0.85",
            _list(DECODES, cases, lambda row: f"{_over(row, 'copy', 'op'):.2f}"),
        ),
        "decode, 1x8k": (
            "16 us",
            _list(DECODES[:1], cases, lambda row: f"{1e6 * row['seconds']['op']:.1f} us"),
        ),
        "fp8 over bfloat16": (
            "1.6",
            _list(DECODES, codes, lambda row: f"{_over(row, 'plain', 'e4m3'):.2f}"),
        ),
        "4, 8-bit weights over bfloat16": (
            "",
            "; ".join(_gains(each) for each in layers) or NOTHING,
        ),
        "tests": ("", _tests(folder / "gpu_tests.txt")),
        "kit": ("", _kit(folder / "gpu_kit.json")),
        "sanitizer": ("", _list(TOOLS, tools, lambda row: row["state"])),
        "replays differing": ("0", _replays(_part(folder, "replays"))),
        "engine over generate_batch, vLLM, SGLang": (
            "",
            _list(MODELS, models, _over_engines),
        ),
        "shares of a step": (
            "",
            _list(MODELS, models, _shares),
        ),
    }


def question(folder: Path) -> dict[str, Any]:
    """The table as a section of docs/benchmarks.md; what was not measured is in one row."""
    found = table(folder)
    names = {name: f"{name} ({goal})" if goal else name for name, (goal, _) in found.items()}
    rows = {names[each]: [cells[1]] for each, cells in found.items() if cells[1] != NOTHING}
    if missing := [names[each] for each, cells in found.items() if cells[1] == NOTHING]:
        rows["; ".join(missing)] = [NOTHING]
    files = sorted(folder.glob("gpu_*.json"))
    devices = {json.loads(path.read_text()).get("device") for path in files} - {None}
    return {
        "order": 6.5,
        "question": "Goals on a GPU?",
        "command": "bash benchmarks/gpu_all.sh FOLDER",
        "reading": "of an H100.",
        "columns": [{"shows": ", ".join(sorted(devices)) or "measured"}],
        "rows": rows,
    }


def _part(folder: Path, name: str) -> Rows:
    return _read(folder / f"gpu_{name}.json", name)


def _read(path: Path, name: str) -> Rows:
    return json.loads(path.read_text()).get(name, []) if path.exists() else []


def _by(rows: Rows, key: str) -> dict[str, dict[str, Any]]:
    return {row[key]: row for row in rows}


def _provided(folder: Path) -> dict[str, dict[str, float]]:
    """Speed over SDPA by case and provider."""
    found: dict[str, dict[str, float]] = {}
    for file in PROVIDED:
        for row in _read(folder / f"gpu_{file}.json", "providers"):
            names = row["seconds"].keys() - {"copy", "triton"}
            found.setdefault(row["case"], {}).update(
                {each: over_sdpa(row["seconds"], each) for each in names if each[:4] != "sdpa"}
            )
    return found


def _prefill(row: dict[str, Any], provided: Mapping[str, float]) -> str:
    own, best = over_sdpa(row["seconds"]), max(provided, key=provided.__getitem__, default="")
    faster = f" ({best} {provided[best]:.2f})" if best and provided[best] > own else ""
    return f"{own:.2f}{faster}"


def _list(names: list[str], rows: Mapping[str, dict[str, Any]], cell: Callable[[Any], str]) -> str:
    if not any(name in rows for name in names):
        return NOTHING
    return ", ".join(cell(rows[name]) if name in rows else NOTHING for name in names)


def _over(row: dict[str, Any], other: str, own: str) -> float:
    return float(row["seconds"][other] / row["seconds"][own])


def _gains(row: dict[str, Any]) -> str:
    gains = [f"{_over(row, 'bfloat16', bits):.2f}" for bits in ("4 bits", "8 bits")]
    return f"{row['layer']} {', '.join(gains)}"


def _over_engines(row: dict[str, Any]) -> str:
    own, others = row["speeds"]["ours"], ("generate_batch", "vllm", "sglang")
    speeds = [row["speeds"].get(name) for name in others]
    return ", ".join(f"{own / speed:.2f}" if speed else NOTHING for speed in speeds)


def _shares(row: dict[str, Any]) -> str:
    return ", ".join(f"{row['shares'][kind]:.2f}" for kind in KINDS)


def _replays(rows: Rows) -> str:
    recorded = [row for row in rows if row["recorded"]]
    count = sum(row["replays"] for row in recorded)
    different = sum(row["different"] for row in recorded)
    return f"{different} of {count:,}" if recorded else NOTHING


def _kit(path: Path) -> str:
    ran = [each for each in _read(path, "cases") if each["steps"]]
    passed = sum(each["status"] == "passed" for each in ran)
    return f"{passed} of {len(ran)} cases" if ran else NOTHING


def _tests(path: Path) -> str:
    text = path.read_text() if path.exists() else ""
    counts = {kind: found[-1] for kind in ("failed", "passed")
              if (found := re.findall(rf"(\d+) {kind}", text))}  # fmt: skip
    return ", ".join(f"{count} {kind}" for kind, count in counts.items()) or NOTHING


def main() -> None:
    """Prints a line for each goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path, help="write the section of the docs here")
    options = parser.parse_args()
    for name, (goal, measured) in table(options.folder).items():
        print(f"{name:48}{goal:>8}  {measured}")
    if options.json:
        options.json.write_text(json.dumps(question(options.folder), indent=1) + "\n")


if __name__ == "__main__":
    main()
