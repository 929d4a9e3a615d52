"""`torch.compile` for one graph: compilers, limits, errors."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch

from graphs.torch_internals.direct_call import cheap_calls
from graphs.torch_internals.regions import refuse_effects
from graphs.torch_internals.replay.replay import replay_loads
from graphs.torch_internals.vectors import trust_vectors
from graphs.watch.causes import site_of_error, site_of_stack

__all__ = [
    "compile_functional",
    "compile_once",
    "compiling",
    "compiling_after",
    "cpp_compiler",
    "has_cpp_compiler",
    "import_inductor",
    "is_missing_compiler",
    "why_stale",
]

_BEFORE: ContextVar[Callable[[], object] | None] = ContextVar("before a compile", default=None)


@contextlib.contextmanager
def compiling_after(wait: Callable[[], object]) -> Iterator[None]:
    """Call ``wait`` between the trace and the compile of each capture inside the context."""
    before = _BEFORE.set(wait)
    try:
        yield
    finally:
        _BEFORE.reset(before)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Settings of torch that make compiles and calls fast."""
    with cheap_calls(), trust_vectors(), replay_loads(), refuse_effects():
        yield


def compile_once(
    function: Callable[..., Any], compiler: str | Callable[..., Any], **how: Any
) -> Callable[..., Any]:
    """Return a function that torch compiles to one full graph at its first call, and never again.

    Args:
        function: to compile; has a code object of its own.
        compiler: a Dynamo backend, or the name of one.
        how: `mode` and `options` of `torch.compile`.
    """
    settings: dict[str, Any]
    if wait := _BEFORE.get():
        compiler, how = _After(wait, _named(compiler, **how)), {}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        settings = {"isolate_recompiles": True, "recompile_limit": 1, "backend": compiler, **how}
    else:
        settings = {"backend": _OneGraph(compiler, **how)}
    return torch.compile(function, fullgraph=True, dynamic=False, **settings)


def compile_functional(
    graph: Any, example_inputs: Any, compiler: Callable[[Any, Any], Callable[[Any], Any]]
) -> Any:
    """Compile a Dynamo graph that AOTAutograd has made functional.

    Args:
        compiler: takes the graph and its examples; returns a function of a list of inputs.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func

    def compile_forward(forward: Any, examples: Any) -> Any:
        run = compiler(forward, examples)
        return make_boxed_func(lambda *inputs: run(inputs))

    compile_graph = aot_autograd(fw_compiler=compile_forward, keep_inference_input_mutations=True)
    return compile_graph(graph, example_inputs)


def has_cpp_compiler() -> bool:
    """Whether inductor finds a C++ compiler; True where this torch cannot say."""
    try:
        cpp_compiler()
    except (ImportError, AttributeError):
        return True  # the capture itself will say
    except Exception:
        return False
    return True


def cpp_compiler() -> str:
    """Return the C++ compiler that inductor uses; raise if it finds none."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    return str(get_cpp_compiler())


def import_inductor() -> None:
    """Import what the first compile needs, and hash torch's sources, as its cache does: seconds."""
    with contextlib.suppress(Exception):
        importlib.import_module("torch._inductor.compile_fx")
        importlib.import_module("torch._inductor.codecache").torch_key()


def is_missing_compiler(error: BaseException) -> bool:
    """Whether a compile failed because there is no C++ compiler."""
    return type(getattr(error, "inner_exception", error)).__name__ == "InvalidCxxCompiler"


def why_stale(error: Exception) -> str | None:
    """Return the guard that failed, if an error of a run means that; else None."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, _SecondGraph):
        return str(inner) or "a guard no longer holds"
    if isinstance(error, FailOnRecompileLimitHit):
        site = site_of_error(error)
        return site.reason if site and site.reason else "a guard no longer holds"
    return None


def _named(
    compiler: str | Callable[..., Any],
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    from torch._dynamo import lookup_backend

    found: Callable[..., Any]
    if compiler == "inductor":
        found = torch._TorchCompileInductorWrapper(mode, options and dict(options), False)
    else:
        found = lookup_backend(compiler)
    return found


class _After:
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
