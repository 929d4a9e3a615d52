"""Builds the kernels for an instruction set, once for all processes that want the same."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from compiled_attn.errors import NativeUnavailable
from compiled_attn.ops.cpu.isa import flags_of
from compiled_attn.ops.cpu.libraries import is_whole, put, remove_unused, turn
from compiled_attn.ops.schema import SOURCES
from graphs.errors import StoreError
from graphs.files import digest_of, remove
from graphs.store.cache_folder import cache_folder
from graphs.store.lock import why_no_locks
from graphs.store.safety import refuse_unsafe
from graphs.torch_internals.compiling import cpp_compiler

__all__ = [
    "KERNELS",
    "UNITS",
    "Build",
    "Plan",
    "build",
    "default_folder",
    "digests_of",
    "find_compiler",
]

KERNELS = ("paged_attention.cpp", "packed_linear.cpp", "drawn_tokens.cpp")
"""Translation units that are compiled for an instruction set."""
UNITS = (*KERNELS, "op.cpp", "tape.cpp", "torch_products.cpp")
"""All translation units of a library."""
_COMMON = (
    "-std=c++20",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
)
_CHECKED = ("-O1", "-g", "-fno-omit-frame-pointer", "-DCOMPILED_ATTN_DEBUG")
_PATIENCE_SECONDS = 600.0
# Processor seconds of g++ 12 for all units, and for the longest of them, for AVX-512 (2026-11-27);
# AVX2 takes half.
_ALL_UNITS_SECONDS, _LONGEST_UNIT_SECONDS = 80, 40

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
        library: its file.
        isa: its instruction set.
        seconds: how long it took to build; 0 where it was there already.
        is_prebuilt: whether it came with the wheel.
    """

    library: Path
    isa: str
    seconds: float
    is_prebuilt: bool = False

    def __str__(self) -> str:
        if self.is_prebuilt:
            return f"{self.isa}, prebuilt"
        built = f"built in {self.seconds:.1f} s" if self.seconds else "built before"
        return f"{self.isa}, {built}"


def default_folder() -> Path:
    """Where libraries are kept unless one says otherwise.

    Raises:
        StoreError: nobody knows where the user's home is.
    """
    return cache_folder("compiled-attn-kernels")


def find_compiler() -> str:
    """The C++ compiler that inductor takes, or else one that is on the path.

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
    debug: bool = False,
    sanitize: Sequence[str] = (),
    plain_tiles: bool = False,
    compiler: str | None = None,
    sources: Path = SOURCES,
) -> Build:
    """The library of an instruction set: out of the cache, or built now.

    It is kept under a hash of the sources, the flags, the compiler and its version, torch's
    version, the machine and its C library, until no process took it for 30 days. Processes that
    want the same wait for one that builds it; a killed one leaves nothing that another takes for a
    library.

    Args:
        isa: one of `isa.ISAS`.
        namespace: of the ops that the library registers.
        folder: where libraries are kept; None: `default_folder`.
        debug: symbols, no optimisation, checks in the kernels.
        sanitize: sanitizers, as ``-fsanitize`` takes them.
        plain_tiles: products of tiles in plain C++, bit for bit what AMX gives; for tests.
        compiler: None: `find_compiler`.
        sources: folder of the C++ sources.

    Raises:
        NativeUnavailable: no compiler, an error of the compiler, a folder that cannot be written or
            that others can write to.
    """
    if why := why_no_locks():
        raise NativeUnavailable(f"expected locks between processes, but {why}: use Linux or macOS")
    compiler = compiler or find_compiler()
    plan = Plan(compiler, sources, isa, namespace, debug, tuple(sanitize), plain_tiles)
    home = folder
    try:
        home = home or default_folder()
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        refuse_unsafe(home.resolve())
        return _cached(home.resolve(), plan)
    except NativeUnavailable:
        raise
    except (StoreError, OSError) as error:
        raise NativeUnavailable(
            f"expected a folder of your own to keep the kernel in, got {home or 'none'}: {error}"
        ) from error


@dataclass(frozen=True)
class Plan:
    """How a library is built; the fields are arguments of `build`."""

    compiler: str
    sources: Path
    isa: str
    namespace: str
    debug: bool
    sanitize: tuple[str, ...]
    plain_tiles: bool

    def name(self) -> str:
        """The library's name: its instruction set and the hash of all that it depends on."""
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
        """Flags of the compiler for one of `UNITS`."""
        checked = self.debug or self.sanitize
        flags = [*_COMMON, *(_CHECKED if checked else ()), *self._sanitizers()]
        if unit in KERNELS:
            # Only kernels may use the instruction set: what headers inline in the other unit would
            # else be taken by the linker for all.
            tiles = ["-DCOMPILED_ATTN_PLAIN_TILES"] if self.plain_tiles else []
            own = [*flags_of(self.isa), "-fopenmp", *tiles]
            return [*flags, *own, *(() if checked else ("-O3",))]
        headers = _torch_folder() / "include"
        own = [f"-I{headers}", f"-DCOMPILED_ATTN_NAMESPACE={self.namespace}"]
        return [*flags, *own, *(() if checked else ("-O1",))]

    def link_flags(self) -> list[str]:
        """Flags of the linker for a library that stays on this machine."""
        libraries = _torch_folder() / "lib"
        torch_flags = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch_cpu", "-ltorch"]
        return ["-shared", "-fopenmp", "-Wl,-Bsymbolic", *self._sanitizers(), *torch_flags]

    def compile(self, work: Path) -> Path:
        """All units side by side, then the link; returns the library."""
        objects = {unit: str(work / f"{unit}.o") for unit in UNITS}
        _run_all(
            [
                [self.compiler, *self.compile_flags(unit), "-c", str(self.sources / unit), "-o", to]
                for unit, to in objects.items()
            ]
        )
        library = work / "library.so"
        # Libraries behind the objects that need them, or a linker may drop them.
        link = [self.compiler, *objects.values(), *self.link_flags(), "-o", str(library)]
        _run_all([link])
        return library

    def _sanitizers(self) -> list[str]:
        if not self.sanitize:
            return []
        names = ",".join(self.sanitize)
        return [f"-fsanitize={names}", f"-fno-sanitize-recover={names}"]


def _cached(folder: Path, plan: Plan) -> Build:
    name = plan.name()
    library = folder / f"{name}.so"
    if is_whole(library):
        return Build(library, plan.isa, 0.0)
    with turn(library, _PATIENCE_SECONDS, lambda: _say_wait(plan)):
        if is_whole(library):  # another process built it while this one waited
            return Build(library, plan.isa, 0.0)
        started = time.perf_counter()
        for rest in folder.glob(f".{name}.*"):  # of builds that were killed: it is our turn
            remove(rest)
        _say_build(plan)
        work = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=folder))
        try:
            put(plan.compile(work), library)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        remove_unused(folder)
        return Build(library, plan.isa, round(time.perf_counter() - started, 3))


def digests_of(sources: Path) -> dict[str, str]:
    """SHA-256 of each C++ source in a folder, by its name."""
    files = sorted(path for path in sources.iterdir() if path.suffix in (".h", ".cpp"))
    return {path.name: digest_of(path) for path in files}


def _say_build(plan: Plan) -> None:
    seconds = max(_LONGEST_UNIT_SECONDS, _ALL_UNITS_SECONDS // (os.cpu_count() or 1))
    _say(
        f"building the native kernel for {plan.isa} with {plan.compiler}, about {seconds} s, "
        "once on this machine"
    )


def _say_wait(plan: Plan) -> None:
    _say(f"another process builds the native kernel for {plan.isa}: waiting for it")


def _say(text: str) -> None:
    print(f"compiled-attn: {text}", file=sys.stderr, flush=True)


def _run_all(commands: Sequence[Sequence[str]]) -> None:
    """Runs commands side by side.

    Raises:
        NativeUnavailable: one failed; the message has the beginning of what it said.
    """
    processes: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            processes.append(
                subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
            )
        told = [process.communicate()[0] for process in processes]
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
    for process, text, command in zip(processes, told, commands, strict=True):
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
