"""The machine, versions and date of a result."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from graphs.capture.memory import machine_bytes
from graphs.cgroups import lines_of, usable_cores

__all__ = ["machine", "surroundings"]

_CPUINFO = Path("/proc/cpuinfo")


def surroundings(packages: Iterable[str] = ()) -> dict[str, Any]:
    """Date (UTC), torch's threads, :func:`machine` and versions, for a report.

    Args:
        packages: distributions to list besides Python and torch; the version of one that is not
            installed is None.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "threads": torch.get_num_threads(),
        "machine": machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{name: _version(name) for name in packages},
        },
    }


def machine() -> dict[str, Any]:
    """The processor's model, cores, bytes of memory, and vector units.

    `usable_cores` is the number that this process or its container may use. `avx512` and `amx` are
    None if the system does not list the processor's features.
    """
    has = set(_cpuinfo("flags").split())
    return {
        "cpu": _cpuinfo("model name") or _lscpu() or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_bytes": machine_bytes(),
        "avx512": "avx512f" in has if has else None,
        "amx": "amx_tile" in has if has else None,
        "system": f"{platform.system()} {platform.release()}",
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpuinfo(name: str) -> str:
    rows = (line.partition(":") for line in lines_of(_CPUINFO))
    return next((value.strip() for key, _, value in rows if key.strip() == name), "")


def _lscpu() -> str:
    # On ARM the kernel only gives numbers, which lscpu translates.
    program = shutil.which("lscpu")
    if program is None:
        return ""
    in_english = {"LC_ALL": "C"}
    done = subprocess.run([program], capture_output=True, text=True, env=in_english, check=False)
    found = re.search(r"^Model name:[ \t]*(.+)$", done.stdout, re.MULTILINE)
    return found[1].strip() if found else ""
