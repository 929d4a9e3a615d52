"""Builds the libraries of a wheel: ``python -m compiled_attn.ops.cpu.prebuild FOLDER``.

One per instruction set of this machine's architecture, with the oldest supported torch, whose
libraries newer ones load. `make wheel` runs it.
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
    """Builds a library for each instruction set, and the manifest, into a new folder.

    Does not link OpenMP: libtorch_cpu provides its symbols, so that a process has only one. Sets no
    path to torch either, which the process has already loaded.

    Raises:
        NativeUnavailable: there is no compiler.
        subprocess.CalledProcessError: it fails, with its output on stderr.
    """
    folder.mkdir(parents=True, exist_ok=True)
    compiler = find_compiler()
    plans = [Plan(compiler, SOURCES, isa, _NAMESPACE, (), False) for isa in isas]
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(os.cpu_count()) as pool:
        # The other units do not depend on the instruction set.
        shared = {unit: _object(work, "all", unit) for unit in UNITS if unit not in KERNELS}
        jobs = [(plans[0], *each) for each in shared.items()]
        jobs += [(p, unit, _object(work, p.isa, unit)) for p in plans for unit in KERNELS]
        list(pool.map(lambda job: _run(job[0].compile_command(*job[1:])), jobs))
        for plan in plans:
            kernels = [_object(work, plan.isa, unit) for unit in KERNELS]
            _link(compiler, [*kernels, *shared.values()], folder / f"{plan.isa}.so")
    libraries = [folder / f"{isa}.so" for isa in isas]
    release = torch.__version__.partition("+")[0]
    made = Manifest(release, platform.machine(), _platform_tag(libraries), digests_of(SOURCES))
    made.write(folder)
    return made


def _object(work: str, isa: str, unit: str) -> Path:
    return Path(work, f"{isa}-{Path(unit).stem}.o")


def _link(compiler: str, objects: Sequence[Path], library: Path) -> None:
    torch_flags = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-ltorch"]
    flags = ["-shared", "-Wl,-Bsymbolic", "-Wl,-s", *torch_flags]
    _run([compiler, *map(str, objects), *flags, "-o", str(library)])


def _platform_tag(libraries: Sequence[Path]) -> str:
    """The tag of the oldest glibc that has all symbol versions that the libraries need."""
    symbols = [_run(["objdump", "-T", str(library)]) for library in libraries]
    newest = max(int(number) for text in symbols for number in _GLIBC.findall(text))
    return f"manylinux_2_{newest}_{platform.machine()}"


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def _main() -> None:
    parser = argparse.ArgumentParser(description="Build the kernels of a wheel.")
    parser.add_argument("folder", type=Path, help="output folder")
    parser.add_argument("--isa", action="append", help="instruction set; default: all")
    parser.add_argument(
        "--any-torch", action="store_true", help=f"with another torch than {OLDEST_TORCH}"
    )
    options = parser.parse_args()
    if not options.any_torch and not torch.__version__.startswith(f"{OLDEST_TORCH}."):
        parser.error(
            f"expected torch {OLDEST_TORCH}, whose libraries newer ones load, got "
            f"{torch.__version__}: run `make wheel`, or take --any-torch for your own use"
        )
    started = time.perf_counter()
    made = prebuild(options.folder, options.isa or isas_of_machine())
    for library in sorted(options.folder.glob("*.so")):
        print(f"{library}: {library.stat().st_size / 2**20:.2f} MiB")
    print(f"{made.platform}, torch {made.torch}, {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    _main()
