"""The ops ``paged_attention``, ``packed_linear``, ``drawn_tokens`` and what goes with them.

`load` gives torch one implementation of them a process: C++ for this processor, prebuilt in a wheel
or built on first use, or else the Python reference; and for CUDA tensors, where there is Triton,
that of `compiled_attn.ops.triton`. A variant that is asked for by name (another instruction set, a
debug build) has ops in a namespace of its own, so that variants can be compared in one process.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiled_attn.errors import KernelArgumentError, NativeUnavailable
from compiled_attn.ops import drawn_tokens, packed_linear, reference
from compiled_attn.ops.cpu.build import Build, build
from compiled_attn.ops.cpu.calibration import settle
from compiled_attn.ops.cpu.forms import Chosen
from compiled_attn.ops.cpu.isa import ask_permission, available_isas
from compiled_attn.ops.cpu.player import NativePlayer
from compiled_attn.ops.cpu.prebuilt import prebuilt
from compiled_attn.ops.schema import schemas
from compiled_attn.ops.triton.register import register, why_not

__all__ = ["NAMESPACE", "REFERENCE", "NativeOps", "load", "refusing"]

NAMESPACE = "compiled_attn"
REFERENCE = "reference"

_REFUSAL = re.compile(r"paged_attention_?: expected ")
"""How C++ begins what it refuses (``arguments.h``)."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NativeOps:
    """An implementation of the ops; arguments are those of `reference.paged_attention`.

    Attributes:
        namespace: of the ops, below ``torch.ops``.
        isa: instruction set, or "reference" for Python.
        build: the library; None for Python.
        why_not_native: why Python serves; None where it does not, or was asked for.
        why_not_best: why ``isa`` is not the best that this processor has; None where it is, or was
            asked for, or Python serves.
        chosen: the forms that the kernels take, as measured; None for Python, and for a variant,
            which takes the best guess.
    """

    namespace: str
    isa: str
    build: Build | None = None
    why_not_native: str | None = None
    why_not_best: str | None = None
    chosen: Chosen | None = None

    def player(self) -> NativePlayer | None:
        """Plays tapes of graphs that call these ops; None for Python."""
        return NativePlayer(self.build.library, self.namespace) if self.build else None

    def paged_attention(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See `reference.paged_attention`."""
        op = getattr(torch.ops, self.namespace).paged_attention
        out, lse = refusing(op, *args, **kwargs)
        return out, lse

    def paged_attention_(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See `reference.paged_attention_`."""
        op = getattr(torch.ops, self.namespace).paged_attention_
        out, lse = refusing(op, *args, **kwargs)
        return out, lse

    def packed_linear(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> Tensor:
        """See `packed_linear.reference`."""
        out: Tensor = getattr(torch.ops, self.namespace).packed_linear(input, weight, bias, scale)
        return out

    def packed_linears(
        self,
        input: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor] = (),
        scales: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        """See `packed_linear.reference_all`."""
        op = getattr(torch.ops, self.namespace).packed_linears
        out: list[Tensor] = op(input, weights, biases, scales)
        return out

    def packed_gated(
        self,
        input: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor] = (),
        scales: Sequence[Tensor] = (),
    ) -> Tensor:
        """See `packed_linear.reference_gated`."""
        op = getattr(torch.ops, self.namespace).packed_gated
        out: Tensor = op(input, weights, biases, scales)
        return out

    def packed_rows(self, weight: Tensor, ids: Tensor) -> Tensor:
        """See `packed_linear.rows`; ids ``[n]``; one out of range is an error."""
        out: Tensor = getattr(torch.ops, self.namespace).packed_rows(weight, ids)
        return out

    def drawn_tokens(self, logits: Tensor, *settings: Tensor) -> Tensor:
        """See `drawn_tokens.reference`; native, it may be `drawn_tokens.UNDECIDED`."""
        out: Tensor = getattr(torch.ops, self.namespace).drawn_tokens(logits, *settings)
        return out


def refusing(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What an op returns; what its C++, which has only ``RuntimeError``, refuses is a
    KernelArgumentError as in Python. A graph that calls the op by itself still raises the former.
    """
    try:
        return op(*args, **kwargs)
    except RuntimeError as error:
        if isinstance(error, KernelArgumentError) or not _REFUSAL.match(str(error)):
            raise
        raise KernelArgumentError(str(error)) from None


def load(
    isa: str | None = None,
    *,
    strict: bool = False,
    debug: bool = False,
    sanitize: Sequence[str] = (),
    plain_tiles: bool = False,
    folder: Path | None = None,
) -> NativeOps:
    """Builds the kernels if they are not in the cache, loads them, and registers the ops.

    The first call of a process decides for all: later ones return the same ops. Threads may call it
    at the same time.

    Args:
        isa: one of `isa.ISAS`, or "reference". None: the best that this processor has and that can
            be built; a step down is logged.
        strict: an error where the kernels cannot be built; otherwise Python serves, which is logged
            once. A variant that is asked for by name is always strict.
        debug: symbols, no optimisation, checks in the kernels.
        sanitize: sanitizers to build with; their runtime must be preloaded.
        plain_tiles: products of tiles in plain C++, as AMX would give them.
        folder: where libraries are kept, see `build.build`.

    Raises:
        NativeUnavailable: there is no compiler, it fails, or the folder is not safe (strict, or a
            variant).
    """
    return _LOADER.load(isa, strict, _Variant(debug, tuple(sanitize), plain_tiles), folder)


@dataclass(frozen=True)
class _Variant:
    debug: bool
    sanitize: tuple[str, ...]
    plain_tiles: bool

    def words(self) -> list[str]:
        """The words of its namespace."""
        flags = {"debug": self.debug, "plain_tiles": self.plain_tiles}
        return [*(word for word, is_set in flags.items() if is_set), *self.sanitize]


class _Loader:
    """What was registered in this process: torch keeps one op a name, and so must we."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ops: dict[str, NativeOps] = {}
        self._libraries: list[torch.library.Library] = []

    def load(
        self,
        isa: str | None,
        strict: bool,
        variant: _Variant,
        folder: Path | None,
    ) -> NativeOps:
        words = [*([isa] if isa else []), *variant.words()]
        namespace = "_".join([NAMESPACE, *words])
        with self._lock:
            ops = self._ops.get(namespace)
            if ops is None:
                ops = self._register(namespace, isa, strict or bool(words), variant, folder)
                self._ops[namespace] = ops
        if strict and ops.why_not_native is not None:
            raise NativeUnavailable(ops.why_not_native)
        return ops

    def _register(
        self,
        namespace: str,
        isa: str | None,
        strict: bool,
        variant: _Variant,
        folder: Path | None,
    ) -> NativeOps:
        fragment = torch.library.Library(namespace, "FRAGMENT")
        self._libraries.append(fragment)  # what it registers lives as long as it does
        ops = NativeOps(namespace, REFERENCE)
        if isa != REFERENCE:
            try:
                isas = [isa] if isa else available_isas()
                ops = _first_that_builds(isas, namespace, variant, folder)
            except NativeUnavailable as error:
                if strict:
                    raise
                _log.warning("the native kernel is not used: %s", error)
                ops = NativeOps(namespace, REFERENCE, why_not_native=str(error))
        if ops.isa == REFERENCE:
            _define_in_python(fragment)
        elif namespace == NAMESPACE and ops.build is not None:
            chosen = settle(ops.build.library, ops.isa, getattr(torch.ops, namespace))
            ops = replace(ops, chosen=chosen)
        if namespace == NAMESPACE and why_not() is None:
            register(fragment)
        for name, fake in _FAKES.items():
            torch.library.register_fake(f"{namespace}::{name}", fake, lib=fragment)
        return ops


_LOADER = _Loader()


def _first_that_builds(
    isas: Sequence[str], namespace: str, variant: _Variant, folder: Path | None
) -> NativeOps:
    """Builds and loads the first instruction set that can be.

    An old compiler may not know the best one of a new processor, nor an old system its registers.

    Raises:
        NativeUnavailable: none can be; it is the error of the first.
    """
    first: Exception | None = None
    for isa in isas:
        try:
            ask_permission(isa)
            made = _loaded(isa, namespace, variant, folder)
        except (NativeUnavailable, OSError) as error:
            first = first or error
            continue
        if first is None:
            return NativeOps(namespace, isa, made)
        _log.warning("the native kernel is built for %s, not for %s: %s", isa, isas[0], first)
        return NativeOps(namespace, isa, made, why_not_best=str(first))
    raise NativeUnavailable(str(first)) from first


def _loaded(isa: str, namespace: str, variant: _Variant, folder: Path | None) -> Build:
    """The library that came with the wheel, or else one that is built here; loaded.

    Raises:
        NativeUnavailable: it cannot be built.
        OSError: it cannot be loaded.
    """
    ready = prebuilt(isa, folder) if namespace == NAMESPACE else None
    if ready is not None:
        try:
            torch.ops.load_library(str(ready.library))
        except OSError as error:
            _log.warning(
                "the prebuilt kernel for %s does not load in torch %s, so it is built from source: "
                "%s", isa, torch.__version__, error,
            )  # fmt: skip
        else:
            return ready
    made = build(isa, namespace, folder=folder, **vars(variant))
    torch.ops.load_library(str(made.library))
    return made


def _define_in_python(library: torch.library.Library) -> None:
    for name, schema in schemas().items():
        library.define(schema)
        library.impl(name, _IN_PYTHON[name], "CPU")


def _fake(query: Tensor, key_cache: Tensor, value_cache: Tensor, *_: Any, **__: Any) -> Any:
    tokens, heads = query.shape[:2]
    out = query.new_empty(tokens, heads, value_cache.shape[3])
    return out, query.new_empty(tokens, heads, dtype=torch.float32)


def _fake_write(query: Tensor, key: Tensor, value: Tensor, *caches: Any, **_: Any) -> Any:
    return _fake(query, *caches)


_IN_PYTHON: dict[str, Callable[..., Any]] = {
    "paged_attention": reference.paged_attention,
    "paged_attention_": reference.paged_attention_,
    "packed_linear": packed_linear.reference,
    "packed_linears": packed_linear.reference_all,
    "packed_gated": packed_linear.reference_gated,
    "packed_rows": packed_linear.rows,
    "drawn_tokens": drawn_tokens.reference,
}
_FAKES: dict[str, Callable[..., Any]] = {
    "paged_attention": _fake,
    "paged_attention_": _fake_write,
    "packed_linear": packed_linear.fake,
    "packed_linears": packed_linear.fake_all,
    "packed_gated": packed_linear.fake_gated,
    "packed_rows": packed_linear.fake_rows,
    "drawn_tokens": drawn_tokens.fake,
}
