"""Tests marked gpu under compute-sanitizer: memcheck, racecheck, initcheck.

    python benchmarks/gpu_sanitizer.py [--tools memcheck ...] [--tests PATH ...] [--json FILE]

Looks for the tool on the path, in CUDA's folder and in the Python environment; says so if there is
none. A tool fails if it reports an error, or if the tests do. A checked kernel is up to hundreds of
times as slow, so few tests run. Torch's caching allocator is off: an access past the end of a
tensor is then one past the end of its memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ["memcheck", "racecheck", "initcheck"]
TESTS = ["tests/compiled_attn/ops/test_edges.py"]
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
_PASSED = re.compile(r"(\d+) passed")
_FOLDERS = ["/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin"]
_PACKAGED = "nvidia/*/bin/compute-sanitizer", "nvidia/*/compute-sanitizer/compute-sanitizer"


def find_tool() -> str | None:
    """The path of compute-sanitizer, or None."""
    places = [shutil.which("compute-sanitizer")]
    places += [f"{folder}/compute-sanitizer" for folder in _FOLDERS]
    for entry in map(Path, sys.path):
        places += [str(path) for pattern in _PACKAGED for path in entry.glob(pattern)]
    return next((each for each in places if each and os.access(each, os.X_OK)), None)


def run(sanitizer: str, tool: str, tests: list[str], seconds: float) -> dict[str, Any]:
    """What one tool reports: its errors, and the tests that passed."""
    command = [
        sanitizer, "--tool", tool, "--error-exitcode", "86", "--target-processes", "all",
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "-x", *tests,
    ]  # fmt: skip
    own = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        made = subprocess.run(
            command, cwd=ROOT, env=os.environ | own, capture_output=True, text=True,
            timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"tool": tool, "state": f"not finished in {seconds:.0f} s"}
    return {"tool": tool, **parsed(made.returncode, made.stdout + made.stderr)}


def parsed(code: int, text: str) -> dict[str, Any]:
    """State, errors and passed tests of a run, by its exit code and output."""
    errors = sum(int(each) for each in _SUMMARY.findall(text))
    passed = sum(int(each) for each in _PASSED.findall(text))
    is_right = code == 0 and errors == 0 and passed > 0
    found: dict[str, Any] = {"errors": errors, "passed": passed}
    if not is_right:
        found["tail"] = text.splitlines()[-20:]
    return {"state": "passed" if is_right else f"failed ({code})", **found}


def main() -> None:
    """Prints a line for each tool; exits with 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", nargs="+", default=TOOLS, choices=TOOLS)
    parser.add_argument("--tests", nargs="+", default=TESTS)
    parser.add_argument("--seconds", type=float, default=90, help="of each tool")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sanitizer, found = find_tool(), []
    if sanitizer is None:
        print(f"# not measured: no compute-sanitizer on the path, in {', '.join(_FOLDERS)}")
        found = [{"tool": tool, "state": "not measured"} for tool in options.tools]
    for tool in options.tools if sanitizer else []:
        found.append(run(sanitizer, tool, options.tests, options.seconds))
        print(tool, *(f"{name} {value}" for name, value in found[-1].items() if name != "tool"))
    if options.json:
        options.json.write_text(json.dumps({"sanitizer": found}, indent=1))
    if any(each["state"].startswith("failed") for each in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
