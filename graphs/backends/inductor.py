"""One `torch.compile` callable per graph: full graph, static shapes, compiled once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from graphs.capture.contract import Backend, Frozen, Job
from graphs.capture.input_overlaps import named_tensors, watch_writes
from graphs.capture.inputs import Input, variants_of, with_own_code
from graphs.errors import CaptureError
from graphs.torch_internals.compiling import (
    compile_once,
    compiling,
    has_cpp_compiler,
    is_missing_compiler,
    why_stale,
)
from graphs.torch_internals.direct_call import direct_path
from graphs.torch_internals.events import first_hint
from graphs.torch_internals.example_inputs import mark_symbolic, separate_storages
from graphs.torch_internals.features import with_features
from graphs.torch_internals.replay.replay import Replays
from graphs.watch.causes import describe_failure

__all__ = ["InductorBackend", "freeze", "shareable"]

_log = logging.getLogger(__name__)

_NO_COMPILER = (
    "no working C++ compiler found; install one (Debian/Ubuntu: apt install g++, "
    "Fedora: dnf install gcc-c++, macOS: xcode-select --install), name one in CXX, or use backend "
    "'eager' (--backend eager), which needs none; the wheel of `make wheel` has attention kernels "
    "prebuilt for it"
)


class InductorBackend(Backend):
    """Captures through Dynamo.

    Options: `mode` and `options` of `torch.compile`; `replays`, to which those of graphs on the
    CPU are added (:mod:`graphs.torch_internals.replay`).

    Args:
        name: what users choose it by.
        compiler: the Dynamo backend that gets the graph, as `torch.compile` takes it: `inductor`,
            `aot_eager`, which traces but does not compile, or a function.
    """

    options = MappingProxyType({"mode": None, "options": None, "replays": None})

    def __init__(
        self, name: str = "inductor", compiler: str | Callable[..., Any] = "inductor"
    ) -> None:
        self.name = name
        self._compiler = compiler

    def available(self) -> str | None:
        """Needs a C++ compiler, on a host without an accelerator."""
        if self._compiler != "inductor" or torch.accelerator.is_available():
            return None
        return None if has_cpp_compiler() else _NO_COMPILER

    def capture(self, job: Job) -> Frozen:
        """Compile in the first run."""
        replays, sizes = job.options["replays"], job.spec.sizes
        if not isinstance(replays, Replays | None):
            raise TypeError(
                f"replays: expected Replays or None, got {type(replays).__name__}: make "
                "Replays(replayer)"
            )
        job = replace(job, examples=separate_storages(job.examples))
        make: Callable[[], Frozen] = partial(self.alone, job.with_spec(sizes=None))
        if sizes is not None:
            capture = partial(sizes.capture, job.name, job.examples, job.spec.warm_runs)
            make = partial(capture, partial(self.shared, job), make)
        written = watch_writes(named_tensors(job.function, job.examples))
        frozen = replays.record(make) if replays else make()
        names = written() if sizes is None else sizes.written_by_all(written())
        return replace(frozen, keep_alive=replays, written=names)

    def alone(self, job: Job) -> Frozen:
        """Capture at fixed sizes."""
        return freeze(job, self._compiler)[0]

    def shared(self, job: Job) -> Frozen:
        """Capture with symbolic sizes."""
        return shareable(freeze(job, self._compiler)[0])

    def why_no_symbolic(self) -> str:
        """An empty string: Dynamo has symbols for sizes."""
        return ""


def freeze(job: Job, compiler: str | Callable[..., Any]) -> tuple[Frozen, Any]:
    """Compile in the first run; return the graph and what that run returned.

    Raises:
        CaptureError: a graph break, or the callable or the compiler failed.
    """
    variants = variants_of(job.function)
    for function, simpler in zip(variants, (*variants[1:], None), strict=True):
        make = partial(_freeze, replace(job, function=function), compiler)
        try:
            return with_features(make, keep_all=simpler is not None)
        except CaptureError as error:
            if simpler is None:
                raise
            _log.warning("%s; captured in a simpler way", error)
    raise AssertionError("capture_variants() returned none")


def _freeze(job: Job, compiler: str | Callable[..., Any]) -> tuple[Frozen, Any]:
    own = with_own_code(job.function, job.name)
    mode, options = job.options["mode"], job.options["options"]
    try:
        compiled = compile_once(own, compiler, mode=mode, options=options and dict(options))
        with compiling(), mark_symbolic(job.examples, job.dims):
            result = compiled(*job.examples)
        direct = direct_path(own, job.examples)
        for _ in range(job.spec.warm_runs - 1):
            compiled(*job.examples)
    except Exception as error:
        raise CaptureError(job.name, _why_not(error)) from error
    return Frozen(compiled, stale=why_stale, direct=direct), result


def shareable(frozen: Frozen) -> Frozen:
    """Prepare a graph of symbolic sizes from :func:`freeze` for other captures to share."""
    direct = frozen.direct
    if direct is None:
        return _with_guards(frozen, lambda _: "this torch stores its guards elsewhere")
    why_not = direct.why_not
    frozen = replace(frozen, direct=replace(direct, sees_sizes=False))
    return _with_guards(frozen, lambda examples: why_not(tuple(examples)))


def _with_guards(frozen: Frozen, why_not: Callable[[Sequence[Input]], str]) -> Frozen:
    return replace(frozen, why_not=why_not, why_not_sizes=why_not)


def _why_not(error: Exception) -> str:
    if is_missing_compiler(error):
        return _NO_COMPILER
    if type(error).__name__ == "Unsupported":
        hint = first_hint(error)
        advice = f" (hint: {hint})" if hint else ""
        return f"graph break, expected one full graph: {describe_failure(error)}{advice}"
    return describe_failure(error)
