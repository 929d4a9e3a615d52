"""Builds the kernels for an instruction set, once for all processes."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from compiled_attn.errors import NativeUnavailable
from compiled_attn.ops.cpu.isa import flags_of
from compiled_attn.ops.cpu.libraries import cache_library, default_folder, own_folder
from compiled_attn.ops.schema import SOURCES
from graphs.errors import StoreError
from graphs.files import digest_of
from graphs.store.lock import why_no_locks
from graphs.torch_internals.compiling import cpp_compiler

__all__ = [
    "KERNELS", "PARTS", "UNITS", "Build", "Plan", "build", "build_part", "default_folder",
    "digests_of", "find_compiler", "path_of_part",
]  # fmt: skip

PARTS = {8: "attention/attend_8bit.cpp", 16: "attention/attend_16bit.cpp"}
"""Units for caches of so many bits, which can be libraries of their own."""
KERNELS = (
    *PARTS.values(),
    "attention/paged_attention.cpp",
    "linear/packed_linear.cpp",
    "linear/quantised_linear.cpp",
    "linear/lora.cpp",
    "sampling/sample_tokens.cpp",
    "state/state_ops.cpp",
)
"""Translation units compiled for an instruction set."""
UNITS = (*KERNELS, "op.cpp", "replay.cpp", "linear/aten_matmul.cpp")
"""All translation units of a library."""
_COMMON = (
    "-std=c++20", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno",
    "-fno-trapping-math",
)  # fmt: skip
_CHECKED = ("-O1", "-g", "-fno-omit-frame-pointer", "-DCOMPILED_ATTN_DEBUG")
_LOCK_SECONDS = 600.0
_PIPE = subprocess.PIPE
# CPU seconds of g++ 12 for AVX-512; AVX2 takes half.
_ALL_UNITS_SECONDS, _LONGEST_UNIT_SECONDS = 35, 10

_NO_COMPILER = (
    "expected a C++ compiler to build the native kernel with, found none. Any of these helps: "
    "install g++ (Debian/Ubuntu: apt install g++, Fedora: dnf install gcc-c++) or clang++; name "
    "one in CXX; install the wheel with prebuilt kernels (`make wheel` in a checkout on a machine "
    "with g++, then `pip install dist/*.whl` here); or do without: kernel 'portable' (--kernel "
    "portable), which is slower. Backend 'inductor' needs a compiler too; backend 'eager' "
    "(--backend eager) does not"
)


@dataclass(frozen=True)
class Build:
    """A library of the kernels.

    Attributes:
        library: path of the shared library.
        isa: its instruction set.
        seconds: build time; 0 if it was cached.
        is_prebuilt: whether it came with the wheel.
        is_divided: whether its `PARTS` are libraries of their own.
    """

    library: Path
    isa: str
    seconds: float
    is_prebuilt: bool = False
    is_divided: bool = False

    def __str__(self) -> str:
        if self.is_prebuilt:
            return f"{self.isa}, prebuilt"
        built = f"built in {self.seconds:.1f} s" if self.seconds else "cached"
        return f"{self.isa}, {built}"


def find_compiler() -> str:
    """Finds the C++ compiler that inductor uses, or else one on the path.

    Raises:
        NativeUnavailable: there is none.
    """
    try:
        found = cpp_compiler()
        return shutil.which(found) or found
    except Exception as error:
        for name in ("g++", "clang++"):
            if path := shutil.which(name):
                return path
        raise NativeUnavailable(_NO_COMPILER) from error


def build(
    isa: str,
    namespace: str,
    *,
    folder: Path | None = None,
    sanitize: Sequence[str] = (),
    plain_tiles: bool = False,
    compiler: str | None = None,
    sources: Path = SOURCES,
    divided: bool = False,
) -> Build:
    """Builds the library of an instruction set, or finds it in the cache.

    The key is a hash of sources, flags, compiler and its version, torch's version, machine and C
    library. Processes wait for the one that builds; an interrupted build leaves nothing that others
    would load.

    Args:
        isa: one of `isa.ISAS`.
        namespace: namespace in which the library registers its ops.
        folder: cache of libraries; None: `default_folder`.
        sanitize: sanitizers, as ``-fsanitize`` takes them; also symbols, and checks in the kernels.
        plain_tiles: emulates AMX in plain C++, bit for bit; for tests.
        compiler: None: `find_compiler`.
        sources: folder of the C++ sources.
        divided: leaves `PARTS`, half of the time, to `build_part`.

    Raises:
        NativeUnavailable: no compiler, a compiler error, or a folder that is not writable or that
            others can write to.
    """
    if why := why_no_locks():
        raise NativeUnavailable(f"expected locks between processes, but {why}: use Linux or macOS")
    compiler = compiler or find_compiler()
    plan = Plan(compiler, sources, isa, namespace, tuple(sanitize), plain_tiles, divided)
    with _own_errors(folder):
        return _cached(own_folder(folder), plan)


def build_part(
    bits: int, isa: str, namespace: str, *, folder: Path | None = None, compiler: str | None = None
) -> Path:
    """Builds one of `PARTS` for a divided library, or finds it in the cache.

    Returns its path, where the library finds it. Other arguments and errors are those of `build`.
    """
    plan = Plan(compiler or find_compiler(), SOURCES, isa, namespace, (), False, True)

    def make(work: Path) -> Path:
        _print(f"building the native kernel of {bits}-bit caches for {isa}, once on this machine")
        return plan.compile(work, [PARTS[bits]])

    with _own_errors(folder):
        part = path_of_part(own_folder(folder) / f"{plan.name()}.so", bits)
        cache_library(part, make, _LOCK_SECONDS)
    return part


def path_of_part(library: Path, bits: int) -> Path:
    """Returns the path of one of `PARTS` for a divided library."""
    return library.with_name(f"{library.stem}-{bits}bit.so")


@contextmanager
def _own_errors(folder: Path | None) -> Iterator[None]:
    try:
        yield
    except (StoreError, OSError) as error:
        raise NativeUnavailable(
            f"expected a folder of your own to cache the kernel in, got {folder or 'none'}: {error}"
        ) from error


@dataclass(frozen=True)
class Plan:
    """How a library is built; fields are arguments of `build`."""

    compiler: str
    sources: Path
    isa: str
    namespace: str
    sanitize: tuple[str, ...]
    plain_tiles: bool
    is_divided: bool = False

    @property
    def units(self) -> Sequence[str]:
        """Units of the library."""
        return [each for each in UNITS if not self.is_divided or each not in PARTS.values()]

    def name(self) -> str:
        """Returns the library's name: its instruction set and a hash of all that it depends on."""
        factors = {
            "sources": digests_of(self.sources),
            "flags": [*(self.compile_flags(unit) for unit in UNITS), self.link_flags()],
            "compiler": [self.compiler, _output([self.compiler, "--version"])],
            "torch": torch.__version__,
            "system": [platform.machine(), *platform.libc_ver()],
        }
        key = hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()
        return f"{self.isa}-{key[:32]}"

    def compile_flags(self, unit: str) -> list[str]:
        """Returns compiler flags for one of `UNITS`."""
        flags = [*_COMMON, *(_CHECKED if self.sanitize else ()), *self._sanitizers()]
        if unit in KERNELS:
            # Only kernels may use the instruction set: the linker may pick any copy of an inline
            # function of a header, for all units.
            macros = ["-DCOMPILED_ATTN_PLAIN_TILES"] if self.plain_tiles else []
            macros += ["-DCOMPILED_ATTN_DIVIDED"] if self.is_divided else []
            own = [*flags_of(self.isa), "-fopenmp", *macros]
            # Tests build emulated tiles, and run them little. Without the second option -O1
            # contracts no products and sums, so bits differ from those of the registers.
            level = ["-O1", "-fexpensive-optimizations"] if self.plain_tiles else ["-O3"]
            return [*flags, *own, *([] if self.sanitize else level)]
        headers = _torch_folder() / "include"
        own = [f"-I{headers}", f"-DCOMPILED_ATTN_NAMESPACE={self.namespace}"]
        return [*flags, *own, *(() if self.sanitize else ("-O1",))]

    def link_flags(self) -> list[str]:
        """Returns linker flags for a library that stays on this machine."""
        libraries = _torch_folder() / "lib"
        torch_flags = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch_cpu", "-ltorch"]
        return ["-shared", "-fopenmp", "-Wl,-Bsymbolic", *self._sanitizers(), *torch_flags]

    def compile_command(self, unit: str, to: Path) -> list[str]:
        """Returns the command that compiles one of `UNITS` to an object file."""
        # Not among the flags, which are part of the key: folders differ between installations.
        paths = [f"-I{self.sources}", "-c", str(self.sources / unit), "-o", str(to)]
        return [self.compiler, *self.compile_flags(unit), *paths]

    def compile(self, work: Path, units: Sequence[str] | None = None) -> Path:
        """Compiles units concurrently and links them; returns the library. None: its own."""
        objects = {unit: work / f"{Path(unit).stem}.o" for unit in units or self.units}
        _run_all([self.compile_command(unit, to) for unit, to in objects.items()])
        library = work / "library.so"
        # Libraries come after the objects that need them, or a linker may drop them.
        link = [self.compiler, *map(str, objects.values()), *self.link_flags(), "-o", str(library)]
        _run_all([link])
        return library

    def _sanitizers(self) -> list[str]:
        if not self.sanitize:
            return []
        names = ",".join(self.sanitize)
        return [f"-fsanitize={names}", f"-fno-sanitize-recover={names}"]


def _cached(folder: Path, plan: Plan) -> Build:
    started = 0.0
    library = folder / f"{plan.name()}.so"

    def make(work: Path) -> Path:
        nonlocal started
        started = time.perf_counter()
        seconds = max(_LONGEST_UNIT_SECONDS, _ALL_UNITS_SECONDS // (os.cpu_count() or 1))
        _print(
            f"building the native kernel for {plan.isa} with {plan.compiler}, about {seconds} s, "
            "once on this machine"
        )
        return plan.compile(work)

    def when_waiting() -> None:
        _print(f"another process builds the native kernel for {plan.isa}: waiting for it")

    is_new = cache_library(library, make, _LOCK_SECONDS, when_waiting)
    seconds = round(time.perf_counter() - started, 3) if is_new else 0.0
    return Build(library, plan.isa, seconds, is_divided=plan.is_divided)


def digests_of(sources: Path) -> dict[str, str]:
    """Returns the SHA-256 of each C++ source in a folder, by its relative path."""
    files = sorted(path for path in sources.rglob("*") if path.suffix in (".h", ".cpp"))
    return {path.relative_to(sources).as_posix(): digest_of(path) for path in files}


def _print(text: str) -> None:
    print(f"compiled-attn: {text}", file=sys.stderr, flush=True)


def _run_all(commands: Sequence[Sequence[str]]) -> None:
    """Runs commands concurrently.

    Raises:
        NativeUnavailable: one failed; the message has the beginning of its output.
    """
    processes: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            process = subprocess.Popen(command, stdout=_PIPE, stderr=subprocess.STDOUT, text=True)
            processes.append(process)
        outputs = [process.communicate()[0] for process in processes]
    except OSError as error:
        raise NativeUnavailable(
            f"expected to run {command[0]} to build the kernel, got {error}: "
            "try another compiler (CXX)"
        ) from error
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    for process, text, command in zip(processes, outputs, commands, strict=True):
        if process.returncode:
            raise NativeUnavailable(
                f"expected {command[0]} to build the kernel, but it failed ({process.returncode}): "
                f"{text.strip()[:2000]}; try another compiler (CXX)"
            )


def _output(command: Sequence[str]) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NativeUnavailable(
            f"expected a compiler that works, but {' '.join(command)} fails: {error}"
        ) from error
    return result.stdout


def _torch_folder() -> Path:
    return Path(torch.__file__).parent
