"""Builds the libraries of a wheel: ``python -m compiled_attn.ops.cpu.prebuild FOLDER``.

One for each instruction set of this kind of machine, with the oldest torch that is supported, as
newer ones load what was built with it. `make wheel` runs it.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from compiled_attn.ops.cpu.build import KERNELS, UNITS, Plan, digests_of, find_compiler
from compiled_attn.ops.cpu.isa import isas_of_machine
from compiled_attn.ops.cpu.prebuilt import Manifest
from compiled_attn.ops.schema import SOURCES

__all__ = ["OLDEST_TORCH", "prebuild"]

OLDEST_TORCH = "2.11"
_NAMESPACE = "compiled_attn"
_GLIBC = re.compile(r"\(?GLIBC_2\.(\d+)\)?")


def prebuild(folder: Path, isas: Sequence[str]) -> Manifest:
    """Builds a library for each instruction set, and the manifest, into a folder that is made.

    OpenMP is not linked: its names are found by way of libtorch_cpu, whatever file torch's own
    OpenMP is, so that a process has one of them. Nor is there a path to torch, which the process
    has loaded before.

    Raises:
        NativeUnavailable: there is no compiler.
        subprocess.CalledProcessError: it fails; what it says is on stderr.
    """
    folder.mkdir(parents=True, exist_ok=True)
    compiler = find_compiler()
    plans = [Plan(compiler, SOURCES, isa, _NAMESPACE, False, (), False) for isa in isas]
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(os.cpu_count()) as pool:
        # Units without instructions of a set are the same in all libraries.
        shared = [unit for unit in UNITS if unit not in KERNELS]
        jobs = [(plan, unit, f"{work}/{plan.isa}-{unit}.o") for plan in plans for unit in KERNELS]
        jobs += [(plans[0], unit, f"{work}/{unit}.o") for unit in shared]
        list(pool.map(_compile, *zip(*jobs, strict=True)))
        for plan in plans:
            names = [f"{plan.isa}-{unit}" for unit in KERNELS] + shared
            _link(compiler, [f"{work}/{name}.o" for name in names], folder / f"{plan.isa}.so")
    libraries = [folder / f"{isa}.so" for isa in isas]
    release = torch.__version__.partition("+")[0]
    made = Manifest(release, platform.machine(), _platform_tag(libraries), digests_of(SOURCES))
    made.write(folder)
    return made


def _compile(plan: Plan, unit: str, to: str) -> None:
    source = str(plan.sources / unit)
    _run([plan.compiler, *plan.compile_flags(unit), "-c", source, "-o", to])


def _link(compiler: str, objects: Sequence[str], library: Path) -> None:
    torch_flags = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-ltorch"]
    flags = ["-shared", "-Wl,-Bsymbolic", "-Wl,-s", *torch_flags]
    _run([compiler, *objects, *flags, "-o", str(library)])


def _platform_tag(libraries: Sequence[Path]) -> str:
    """The tag of the oldest glibc that has all versions of symbols that the libraries need."""
    told = [_run(["objdump", "-T", str(library)]) for library in libraries]
    newest = max(int(number) for text in told for number in _GLIBC.findall(text))
    return f"manylinux_2_{newest}_{platform.machine()}"


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def _main() -> None:
    parser = argparse.ArgumentParser(description="Build the kernels of a wheel.")
    parser.add_argument("folder", type=Path, help="where the libraries come to")
    parser.add_argument("--isa", action="append", help="instruction set; default: all")
    parser.add_argument(
        "--any-torch", action="store_true", help=f"with another torch than {OLDEST_TORCH}"
    )
    asked = parser.parse_args()
    if not asked.any_torch and not torch.__version__.startswith(f"{OLDEST_TORCH}."):
        parser.error(
            f"expected torch {OLDEST_TORCH}, whose libraries newer ones load, got "
            f"{torch.__version__}: run `make wheel`, or take --any-torch for your own use"
        )
    started = time.perf_counter()
    made = prebuild(asked.folder, asked.isa or isas_of_machine())
    for library in sorted(asked.folder.glob("*.so")):
        print(f"{library}: {library.stat().st_size / 2**20:.2f} MiB")
    print(f"{made.platform}, torch {made.torch}, {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    _main()
