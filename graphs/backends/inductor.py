"""One `torch.compile` callable per graph: full graph, static shapes, compiled once."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from graphs.backends.direct import direct_path, lean_calls
from graphs.backends.dynamo_inputs import marked, separated
from graphs.backends.headers_ahead import headers_ahead, wait_for_headers
from graphs.backends.kernel_units import few_units
from graphs.backends.tape.tape import Tapes
from graphs.backends.vector_probe import one_probe, probe
from graphs.capture.contract import Backend, Frozen, Job
from graphs.capture.inputs import Input
from graphs.capture.symbolic import SymbolicSizes
from graphs.capture.wrappers import variants_of, with_own_code
from graphs.errors import CaptureError
from graphs.torch_internals.features import with_features
from graphs.watch.causes import describe_failure, site_of_error, site_of_stack

__all__ = ["InductorBackend", "compile_only", "compiling_after", "freeze", "shareable"]

_log = logging.getLogger(__name__)

_NO_COMPILER = (
    "no working C++ compiler found; install one (Debian/Ubuntu: apt install g++, "
    "Fedora: dnf install gcc-c++, macOS: xcode-select --install) or use backend 'eager'"
)


_BEFORE: ContextVar[Callable[[], object] | None] = ContextVar("before a compile", default=None)


@contextlib.contextmanager
def compiling_after(wait: Callable[[], object]) -> Iterator[None]:
    """Calls ``wait`` between the trace of a callable and its compile, for each that is captured."""
    before = _BEFORE.set(wait)
    try:
        yield
    finally:
        _BEFORE.reset(before)


class InductorBackend(Backend):
    """Captures through Dynamo.

    Args:
        name: the name it is chosen by.
        compiler: the Dynamo backend that gets the graph, as `torch.compile` takes it: `inductor`,
            or `aot_eager`, which traces but does not compile, or a function.
    """

    def __init__(
        self, name: str = "inductor", compiler: str | Callable[..., Any] = "inductor"
    ) -> None:
        self.name = name
        self._compiler = compiler

    def available(self) -> str | None:
        """Inductor writes C++ for the CPU, so a host without an accelerator needs a compiler."""
        if self._compiler != "inductor" or torch.accelerator.is_available():
            return None
        try:
            from torch._inductor.cpp_builder import get_cpp_compiler
        except ImportError:
            return None  # another torch keeps it elsewhere: the capture itself will say
        try:
            get_cpp_compiler()
        except Exception:
            return _NO_COMPILER
        return None

    def capture(
        self,
        function: Callable[..., Any],
        example_inputs: Sequence[Input],
        *,
        name: str,
        warm_runs: int,
        symbolic: SymbolicSizes | None = None,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
        tapes: Tapes | None = None,
    ) -> Frozen:
        """Compile in the first run; `mode` and `options` are those of `torch.compile`.

        With `tapes` it gets a tape if it can have one, see :mod:`graphs.backends.tape`.
        """
        if not isinstance(tapes, Tapes | None):
            raise TypeError(
                f"tapes: expected Tapes or None, got {type(tapes).__name__}: make Tapes(player)"
            )
        examples = separated(example_inputs)
        job = Job(function, examples, name, warm_runs, symbolic, mode, options, tapes)
        make: Callable[[], Frozen] = partial(self.alone, replace(job, symbolic=None))
        if symbolic is not None:
            make = partial(symbolic.capture, job, partial(self.shared, job), make)
        frozen = tapes.taping(make) if tapes else make()
        return replace(frozen, keeps=tapes)

    def alone(self, job: Job) -> Frozen:
        """A graph of fixed sizes."""
        return self._frozen(job)

    def shared(self, job: Job) -> Frozen:
        """A graph in which symbols stand for sizes of the inputs."""
        return shareable(self._frozen(job))

    def _frozen(self, job: Job) -> Frozen:
        if self._compiler == "inductor":
            headers_ahead(job)
        return freeze(job, self._compiler)[0]

    def why_no_symbolic(self) -> str:
        """An empty string: Dynamo has symbols for sizes."""
        return ""

    def why_no_precompile(self) -> str:
        """Why inductor's cache on disk cannot be used, or an empty string."""
        if self._compiler != "inductor":
            return super().why_no_precompile()
        import torch._inductor.config as config

        if not getattr(config, "fx_graph_cache", False) or config.force_disable_caches:
            return "inductor's cache on disk is switched off (fx_graph_cache)"
        return ""

    def precompile(
        self, function: Callable[..., Any], example_inputs: Sequence[Input], **settings: Any
    ) -> None:
        """Compile into inductor's cache on disk, and run nothing.

        Raises:
            NotImplementedError: this compiler has no such cache, or it is switched off.
        """
        if reason := self.why_no_precompile():
            raise NotImplementedError(reason)
        job = Job(function, separated(example_inputs), **settings)
        compile_only(job, _inductor(job.mode, job.options))

    def prepare(self) -> None:
        """Load and probe once what every first compile needs, for forked processes to inherit."""
        # It has no kernel: the headers of these are compiled beside the trace of the first graph.
        InductorBackend.precompile(
            self, torch.mm, [torch.ones(8, 8), torch.ones(8, 8)], name="prepare"
        )
        probe()
        wait_for_headers()


def freeze(job: Job, compiler: str | Callable[..., Any]) -> tuple[Frozen, Any]:
    """Compile in the first of the runs: the graph, and what that run returned.

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
    raise AssertionError("a callable has one variant at least")


def _freeze(job: Job, compiler: str | Callable[..., Any]) -> tuple[Frozen, Any]:
    own = with_own_code(job.function, job.name)
    options = job.options and dict(job.options)
    try:
        compiled = _compile_once(own, compiler, mode=job.mode, options=options)
        with _compiling(job):
            result = compiled(*job.examples)
        direct = direct_path(own, job.examples)
        for _ in range(job.warm_runs - 1):
            compiled(*job.examples)
    except Exception as error:
        raise CaptureError(job.name, _why_not(error)) from error
    return Frozen(compiled, stale=_why_stale, direct=direct), result


def shareable(frozen: Frozen) -> Frozen:
    """A graph of symbolic sizes from :func:`freeze`, for others to share."""
    direct = frozen.direct
    if direct is None:
        return replace(frozen, why_not=lambda _: "this torch keeps its guards elsewhere")
    why_not = direct.why_not
    sharing: dict[str, Any] = {"why_not": lambda examples: why_not(tuple(examples))}
    return replace(frozen, direct=replace(direct, sees_sizes=False), **sharing)


def compile_only(job: Job, compiler: Callable[..., Any]) -> None:
    """Trace a callable and give its graph to `compiler`; nothing runs."""

    def compile_and_refuse(graph: Any, inputs: Any) -> Callable[..., Any]:
        compiler(graph, inputs)

        def refuse(*_: Any) -> None:
            raise _Compiled

        return refuse

    compiled = _compile_once(with_own_code(job.function, job.name), compile_and_refuse)
    with _compiling(job), contextlib.suppress(_Compiled):
        compiled(*job.examples)


@contextlib.contextmanager
def _compiling(job: Job) -> Iterator[None]:
    with lean_calls(), one_probe(), few_units(), marked(job.examples, job.dims):
        yield


class _Compiled(Exception):
    pass


def _inductor(mode: str | None, options: Mapping[str, Any] | None) -> Callable[..., Any]:
    """The compiler that `torch.compile(backend="inductor")` uses."""
    compiler: Callable[..., Any]
    compiler = torch._TorchCompileInductorWrapper(mode, options and dict(options), False)
    return compiler


def _compile_once(
    function: Callable[..., Any],
    compiler: str | Callable[..., Any],
    **how: Any,
) -> Callable[..., Any]:
    settings: dict[str, Any]
    if wait := _BEFORE.get():
        compiler, how = _After(wait, _named(compiler, **how)), {}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        settings = {"isolate_recompiles": True, "recompile_limit": 1, "backend": compiler, **how}
    else:
        settings = {"backend": _OneGraph(compiler, **how)}
    return torch.compile(function, fullgraph=True, dynamic=False, **settings)


def _named(
    compiler: str | Callable[..., Any],
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The Dynamo backend of a name; a function is one."""
    from torch._dynamo import lookup_backend

    if compiler == "inductor":
        return _inductor(mode, options)
    found: Callable[..., Any] = lookup_backend(compiler)
    return found


class _After:
    """A Dynamo backend that waits before it compiles."""

    def __init__(self, wait: Callable[[], object], compile: Callable[..., Any]) -> None:
        self._wait, self._compile = wait, compile

    def __call__(self, graph: Any, example_inputs: Any) -> Any:
        self._wait()
        return self._compile(graph, example_inputs)


class _OneGraph:
    """Refuses a second graph, where `torch.compile` cannot limit recompiles (before 2.13)."""

    def __init__(
        self,
        compiler: str | Callable[..., Any],
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._compile: Any = _named(compiler, mode, options)
        self._is_used = False

    def __call__(self, graph: Any, example_inputs: Any) -> Any:
        if self._is_used:
            site = site_of_stack()
            raise _SecondGraph(site.reason if site else "")
        self._is_used = True
        return self._compile(graph, example_inputs)


class _SecondGraph(RuntimeError):
    pass


def _why_not(error: Exception) -> str:
    inner = getattr(error, "inner_exception", error)
    if type(inner).__name__ == "InvalidCxxCompiler":
        return _NO_COMPILER
    if type(error).__name__ == "Unsupported":
        return f"graph break, expected one full graph: {describe_failure(error)}"
    return describe_failure(error)


def _why_stale(error: Exception) -> str | None:
    from torch._dynamo.exc import FailOnRecompileLimitHit

    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, _SecondGraph):
        return str(inner) or "a guard no longer holds"
    if isinstance(error, FailOnRecompileLimitHit):
        site = site_of_error(error)
        return site.reason if site and site.reason else "a guard no longer holds"
    return None
