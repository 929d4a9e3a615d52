"""Loads and registers the ops: ``paged_attention``, ``packed_linear``, ``sample_tokens``.

`load` registers one implementation per process: C++ for this processor, prebuilt in a wheel or
built on first use, or else the Python reference; for CUDA tensors `compiled_attn.ops.triton`. A
named variant (another instruction set, sanitizers) registers its ops in its own namespace, so
that variants can be compared in one process.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import UserDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiled_attn.errors import KernelArgumentError, NativeUnavailable
from compiled_attn.ops.cpu.build import Build, build, build_part
from compiled_attn.ops.cpu.calibration import load_or_calibrate, load_or_calibrate_16bit
from compiled_attn.ops.cpu.isa import available_isas, request_permission
from compiled_attn.ops.cpu.kernel_tuning import TuningResult
from compiled_attn.ops.cpu.parts import (
    bits_of,
    call_when_missing,
    check_provided,
    is_divided,
    provide,
)
from compiled_attn.ops.cpu.prebuilt import prebuilt
from compiled_attn.ops.cpu.replayer import NativeReplayer
from compiled_attn.ops.in_python import FAKES, IN_PYTHON
from compiled_attn.ops.schema import schemas
from compiled_attn.ops.triton.register import register, why_not
from graphs.files import digest_of
from graphs.torch_internals.compiling import import_inductor

__all__ = ["NAMESPACE", "REFERENCE", "NativeOps", "build_ahead", "call_op", "load", "load_library"]

NAMESPACE = "compiled_attn"
REFERENCE = "reference"

# Argument errors of C++ begin like this (``arguments.h``).
_ARGUMENT_ERROR = re.compile(r"(paged_attention_?|state_[a-z]+_): expected ")

_log = logging.getLogger(__name__)

_Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class NativeOps:
    """An implementation of the ops.

    Attributes:
        namespace: namespace of the ops, below ``torch.ops``.
        isa: instruction set, or "reference" for Python.
        build: the library; None for Python.
        why_not_native: why Python is used; None if it is not, or was requested.
        why_not_best: why ``isa`` is not the processor's best; None if it is, or was requested, or
            Python is used.
        tuning: the measured kernel tuning; None for Python, and for variants, which use defaults.
    """

    namespace: str
    isa: str
    build: Build | None = None
    why_not_native: str | None = None
    why_not_best: str | None = None
    tuning: TuningResult | None = None

    def replayer(self) -> NativeReplayer | None:
        """Returns the replayer of graphs that call these ops; None for Python."""
        return NativeReplayer(self.build.library, self.namespace) if self.build else None

    def paged_attention(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See `reference.paged_attention`."""
        out, lse = call_op(self._ops.paged_attention, *args, **kwargs)
        return out, lse

    def paged_attention_(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See `reference.paged_attention_`."""
        out, lse = call_op(self._ops.paged_attention_, *args, **kwargs)
        return out, lse

    def packed_linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `packed_linear.reference`."""
        result: Tensor = self._ops.packed_linear(input, weight, bias)
        return result

    def packed_linears(
        self, input: Tensor, weights: _Tensors, biases: _Tensors = ()
    ) -> list[Tensor]:
        """See `packed_linear.reference_all`."""
        results: list[Tensor] = self._ops.packed_linears(input, weights, biases)
        return results

    def packed_swiglu(self, input: Tensor, weights: _Tensors, biases: _Tensors = ()) -> Tensor:
        """See `packed_linear.reference_swiglu`."""
        result: Tensor = self._ops.packed_swiglu(input, weights, biases)
        return result

    def packed_rows(self, weight: Tensor, ids: Tensor) -> Tensor:
        """See `packed_linear.rows`; ids ``[n]`` out of range are errors."""
        result: Tensor = self._ops.packed_rows(weight, ids)
        return result

    def quantised_linear(self, *args: Any, **kwargs: Any) -> Tensor:
        """See `quantised_linear.reference`."""
        result: Tensor = self._ops.quantised_linear(*args, **kwargs)
        return result

    def quantised_linears(self, *args: Any) -> list[Tensor]:
        """See `quantised_linear.reference_all`."""
        results: list[Tensor] = self._ops.quantised_linears(*args)
        return results

    def quantised_swiglu(self, *args: Any) -> Tensor:
        """See `quantised_linear.reference_swiglu`."""
        result: Tensor = self._ops.quantised_swiglu(*args)
        return result

    def quantised_rows(self, *args: Any) -> Tensor:
        """See `quantised_linear.reference_rows`; ids ``[n]`` out of range are errors."""
        result: Tensor = self._ops.quantised_rows(*args)
        return result

    def add_lora(self, *args: Tensor) -> Tensor:
        """See `lora.reference`."""
        result: Tensor = self._ops.add_lora(*args)
        return result

    def sample_tokens(self, logits: Tensor, *settings: Tensor) -> Tensor:
        """See `sampling.reference`; native results may be `sampling.UNDECIDED`."""
        result: Tensor = self._ops.sample_tokens(logits, *settings)
        return result

    @property
    def _ops(self) -> Any:
        return getattr(torch.ops, self.namespace)


def call_op(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls an op; argument errors of C++, which only has ``RuntimeError``, become
    KernelArgumentError. Graphs that call the op directly still raise ``RuntimeError``.
    """
    try:
        return op(*args, **kwargs)
    except RuntimeError as error:
        if isinstance(error, KernelArgumentError) or not _ARGUMENT_ERROR.match(str(error)):
            raise
        raise KernelArgumentError(str(error)) from None


def load(
    isa: str | None = None,
    *,
    strict: bool = False,
    sanitize: Sequence[str] = (),
    plain_tiles: bool = False,
    cache_dtype: torch.dtype | None = None,
) -> NativeOps:
    """Builds the kernels if they are not cached, loads them, and registers the ops.

    Later calls of a process return the same ops. Thread-safe.

    Args:
        isa: one of `isa.ISAS`, or "reference". None: the best that this processor has and that can
            be built; anything less is logged.
        strict: raise if the kernels cannot be built; otherwise uses Python, and logs it once.
            Named variants are always strict.
        sanitize: sanitizers to build with; their runtime must be preloaded.
        plain_tiles: emulates AMX in plain C++.
        cache_dtype: of the caches that will be used. Kernels of 8-bit and 16-bit caches are built
            when they are needed: now, or else in the first call with such a cache.

    Raises:
        NativeUnavailable: no compiler, a compiler error, or an unsafe folder (if strict, a variant
            or in the kernels of a cache).
    """
    suffixes = [*([isa] if isa else []), *["plain_tiles"] * plain_tiles, *sanitize]
    namespace = "_".join([NAMESPACE, *suffixes])
    with _LOCK:
        if any(thread.is_alive() for thread in _AHEAD):
            import_inductor()  # for the graphs that follow, while g++ runs
        for thread in _AHEAD:
            thread.join()
        ops = _OPS.get(namespace)
        if ops is None:
            options = {"sanitize": tuple(sanitize), "plain_tiles": plain_tiles}
            ops = _register(namespace, isa, strict or bool(suffixes), options)
            _OPS[namespace] = ops
    if strict and ops.why_not_native is not None:
        raise NativeUnavailable(ops.why_not_native)
    bits = bits_of(cache_dtype)
    if bits is None or namespace != NAMESPACE or ops.build is None or not ops.build.is_divided:
        return ops
    if ops.build.is_prebuilt:
        check_provided(ops.build, bits)
    else:
        _provide(bits)
    return _OPS[NAMESPACE]


def build_ahead(*cache_dtypes: torch.dtype | None) -> None:
    """Starts to build the kernels in threads, unless they are cached; `load` waits for them.

    Returns at once, so that imports and reading a model take no time on top. Errors are those of
    `load`, which builds again.

    Args:
        cache_dtypes: see `load`.
    """
    parts = {None, *map(bits_of, cache_dtypes)}
    with _LOCK:
        if NAMESPACE not in _OPS and not _AHEAD:
            for part in parts:
                _AHEAD.append(threading.Thread(target=_build_best, args=(part,), daemon=True))
                _AHEAD[-1].start()


def _build_best(bits: int | None) -> None:
    isa = available_isas()[0]
    with suppress(NativeUnavailable, OSError):
        if prebuilt(isa) is not None:
            return
        if bits is None:
            build(isa, NAMESPACE, divided=True)
        else:
            build_part(bits, isa, NAMESPACE)


def _provide(bits: int) -> None:
    """Builds the kernels of a cache, and measures their tuning."""
    ops = _OPS[NAMESPACE]

    def tune() -> None:
        if bits == 16 and ops.build and ops.tuning:
            library, native = ops.build.library, getattr(torch.ops, NAMESPACE)
            result = load_or_calibrate_16bit(library, ops.isa, native, ops.tuning)
            _OPS[NAMESPACE] = replace(ops, tuning=result)

    provide(ops.isa, NAMESPACE, bits, tune)


def load_library(library: Path, isa: str) -> NativeOps:
    """Loads a library of the kernels that was built before, and registers its ops.

    Nothing is measured: its users have recorded their tuning.

    Args:
        library: its path; it must be trusted.
        isa: the instruction set that it was built for.

    Raises:
        NativeUnavailable: it does not load, or this process uses another library already.
    """
    with _LOCK:
        ops = _OPS.get(NAMESPACE)
        if ops is None:
            try:
                request_permission(isa)
                torch.ops.load_library(str(library))
            except OSError as error:
                raise NativeUnavailable(f"expected kernels in {library}, got {error}") from error
            own = Build(library, isa, 0.0, is_prebuilt=True)
            ops = NativeOps(NAMESPACE, isa, replace(own, is_divided=is_divided(own)))
            fragment = torch.library.Library(NAMESPACE, "FRAGMENT")
            _LIBRARIES.append(fragment)
            _register_fakes(fragment, NAMESPACE)
            _OPS[NAMESPACE] = ops
    if ops.build is None or digest_of(ops.build.library) != digest_of(library):
        raise NativeUnavailable(
            f"expected a process without kernels, got one that loaded {ops}: start another process"
        )
    return ops


# What this process has registered and builds. Graphs do not depend on it: stores read dicts and
# lists of a module into their keys, but not these types.
_OPS: UserDict[str, NativeOps] = UserDict()  # torch allows one implementation per name
_LIBRARIES: deque[torch.library.Library] = deque()
_AHEAD: deque[threading.Thread] = deque()  # build the kernels
_LOCK = threading.Lock()


def _register(
    namespace: str, isa: str | None, strict: bool, options: Mapping[str, Any]
) -> NativeOps:
    fragment = torch.library.Library(namespace, "FRAGMENT")
    _LIBRARIES.append(fragment)  # registrations live as long as it does
    ops = NativeOps(namespace, REFERENCE)
    if isa != REFERENCE:
        try:
            ops = _first_that_builds([isa] if isa else available_isas(), namespace, options)
        except NativeUnavailable as error:
            if strict:
                raise
            _log.warning("the native kernel is not used: %s", error)
            ops = replace(ops, why_not_native=str(error))
    if ops.build is None:
        for name, schema in schemas().items():
            fragment.define(schema)
            fragment.impl(name, IN_PYTHON[name], "CPU")
    elif namespace == NAMESPACE:
        native = getattr(torch.ops, namespace)
        library, divided = ops.build.library, ops.build.is_divided
        ops = replace(ops, tuning=load_or_calibrate(library, ops.isa, native, divided=divided))
    if namespace == NAMESPACE and why_not() is None:
        register(fragment)
    _register_fakes(fragment, namespace)
    return ops


def _register_fakes(fragment: torch.library.Library, namespace: str) -> None:
    for name, fake in FAKES.items():
        torch.library.register_fake(f"{namespace}::{name}", fake, lib=fragment)


def _first_that_builds(
    isas: Sequence[str], namespace: str, options: Mapping[str, Any]
) -> NativeOps:
    """Builds and loads the first instruction set that compiler and system support.

    Raises:
        NativeUnavailable: none; the error of the first.
    """
    first: Exception | None = None
    for isa in isas:
        try:
            request_permission(isa)
            build = _load_library(isa, namespace, options)
        except (NativeUnavailable, OSError) as error:
            first = first or error
            continue
        if first is None:
            return NativeOps(namespace, isa, build)
        _log.warning("the native kernel is built for %s, not for %s: %s", isa, isas[0], first)
        return NativeOps(namespace, isa, build, why_not_best=str(first))
    raise NativeUnavailable(str(first)) from first


def _load_library(isa: str, namespace: str, options: Mapping[str, Any]) -> Build:
    """Loads the wheel's library, or else builds one.

    Raises:
        NativeUnavailable: the build fails.
        OSError: the library does not load.
    """
    ready = prebuilt(isa) if namespace == NAMESPACE else None
    if ready is not None:
        try:
            torch.ops.load_library(str(ready.library))
        except OSError as error:
            _log.warning(
                "building the kernel from source: the prebuilt one for %s fails to load in torch "
                "%s: %s", isa, torch.__version__, error,
            )  # fmt: skip
        else:
            return ready
    made = build(isa, namespace, divided=namespace == NAMESPACE, **options)
    torch.ops.load_library(str(made.library))
    if made.is_divided:
        call_when_missing(made, _provide)
    return made
