"""Events and errors of Dynamo: compiles, graphs and breaks, refused recompiles, hints."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = [
    "CompileHooks",
    "at_compile_end",
    "first_hint",
    "graphs_and_breaks",
    "interrupts_dynamo",
    "is_of_dynamo",
]

_CALLBACKS = "torch._dynamo.callback"
_LIMIT_LOG = "torch._dynamo.convert_frame"
_HINT = "Hint:"


class CompileHooks:
    """Callbacks of compiles; adding them again has no effect.

    Args:
        started: takes the trigger of the compile, such as ``DYNAMO`` or ``LAZY_BACKWARD``.
        ended: called at the end of a compile.
        refused: called when a function has used up its recompiles and runs eagerly from then on.
    """

    def __init__(
        self, started: Callable[[str], None], ended: Callable[[], None], refused: Callable[[], None]
    ) -> None:
        self._started = lambda args: started(args.callback_trigger.name)
        self._ended = lambda _: ended()
        self._refusals = _Refusals(refused)

    @property
    def are_added(self) -> bool:
        """Whether torch has them; `torch._dynamo.reset()` removes them."""
        return self._started in _handler().start_callbacks

    def add(self) -> None:
        """Add those that are missing."""
        handler = _handler()
        if self._started not in handler.start_callbacks:
            handler.register_start_callback(self._started)
        if self._ended not in handler.end_callbacks:
            handler.register_end_callback(self._ended)
        logging.getLogger(_LIMIT_LOG).addHandler(self._refusals)

    def remove(self) -> None:
        """Remove those that are there."""
        if _CALLBACKS not in sys.modules:  # none was added
            return
        handler = _handler()
        logging.getLogger(_LIMIT_LOG).removeHandler(self._refusals)
        if self._started in handler.start_callbacks:
            handler.remove_start_callback(self._started)
        if self._ended in handler.end_callbacks:
            handler.remove_end_callback(self._ended)


class _Refusals(logging.Handler):
    """Detects refused recompiles, which torch reports only in its log."""

    def __init__(self, refused: Callable[[], None]) -> None:
        super().__init__(logging.WARNING)
        self._refused = refused

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("torch._dynamo hit config."):
            self._refused()


@contextmanager
def at_compile_end(callback: Callable[[], object]) -> Iterator[None]:
    """Call a function at the end of each compile inside the context."""
    handler = _handler()
    registered = handler.register_end_callback(lambda _: callback())
    try:
        yield
    finally:
        handler.remove_end_callback(registered)


def graphs_and_breaks() -> tuple[int, int]:
    """How many graphs and graph breaks Dynamo has counted in this process."""
    from torch._dynamo.utils import counters, graph_break_reasons

    return counters["stats"]["unique_graphs"], len(graph_break_reasons)


def interrupts_dynamo(error: type[Exception]) -> type[Exception]:
    """Derive an error that passes through Dynamo, which wraps others in its own."""
    from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError

    def init(self: Any, *args: Any) -> None:
        TorchDynamoException.__init__(self, str(args[0]))
        error.__init__(self, *args)

    return type(error.__name__, (error, TorchRuntimeError), {"__init__": init})


def is_of_dynamo(error: BaseException) -> bool:
    """Whether it is of a class of Dynamo, whose name means nothing to a user."""
    return type(error).__module__.startswith("torch._dynamo")


def first_hint(error: BaseException) -> str:
    """Return the first hint in an error of Dynamo, or an empty string."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((each.removeprefix(_HINT).strip() for each in lines if each.startswith(_HINT)), "")


def _handler() -> Any:
    # torch._dynamo takes seconds to import, so it is imported on first use.
    import torch._dynamo

    return torch._dynamo.callback.callback_handler
