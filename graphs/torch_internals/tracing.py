"""Traces with Dynamo to inspect graphs, guards and breaks, without compiling."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from graphs.torch_internals.settings import unlimited_recompiles

__all__ = ["break_reasons", "constant_in_traces", "quiet_logs", "trace", "why_no_full_graph"]

Function = TypeVar("Function", bound=Callable[..., Any])

_LOUD = {"torch._dynamo": logging.ERROR, "torch._subclasses": logging.CRITICAL}


def constant_in_traces(function: Function) -> Function:
    """`torch.compiler.assume_constant_result`, without loading Dynamo, which takes seconds."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def trace(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    on_graph: Callable[..., Any],
    on_guards: Callable[[Iterable[Any]], None],
) -> None:
    """Run a function, and pass its graphs and guards to callbacks; graph breaks are allowed.

    Args:
        function: has a code object of its own.
        inputs: to call it with.
        on_graph: a Dynamo backend.
        on_guards: takes the guards of each graph.
    """
    import torch._dynamo

    isolate = "isolate_recompiles" in inspect.signature(torch.compile).parameters
    settings: dict[str, Any] = {"isolate_recompiles": True} if isolate else {}
    traced: Callable[..., Any] = torch._dynamo.optimize(
        on_graph, nopython=False, dynamic=False, guard_export_fn=on_guards, **settings
    )(function)
    # Functions called after a break are cached by their own code object, where entries pile up.
    with unlimited_recompiles():
        traced(*inputs)


def break_reasons() -> list[Any]:
    """The graph breaks of this process in order, each with `reason` and `user_stack`."""
    from torch._dynamo.utils import graph_break_reasons

    return list(graph_break_reasons)


def why_no_full_graph(function: Callable[..., Any], inputs: Sequence[Any]) -> Exception | None:
    """Return Dynamo's error if a function is no full graph, else None."""
    import torch._dynamo

    try:
        with unlimited_recompiles():
            torch.compile(function, backend="eager", fullgraph=True)(*inputs)
    except torch._dynamo.exc.TorchDynamoException as error:
        return error
    return None


@contextlib.contextmanager
def quiet_logs(levels: Mapping[str, int] = MappingProxyType(_LOUD)) -> Iterator[None]:
    """Set levels of loggers inside the context, by default to silence logs of graph breaks."""
    before = {name: logging.getLogger(name).level for name in levels}
    try:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
