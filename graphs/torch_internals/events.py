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

    Dynamo is never imported: `add` waits for a call after the program has imported it.

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
        self._were_added = False

    @property
    def are_lost(self) -> bool:
        """Whether `torch._dynamo.reset()` removed them."""
        handler = _loaded_handler()
        return (
            self._were_added
            and handler is not None
            and self._started not in handler.start_callbacks
        )

    def add_once(self) -> None:
        """Add them if they were not added since the last removal, and Dynamo is imported."""
        if not self._were_added:
            self.add()

    def add(self) -> None:
        """Add those that are missing, if Dynamo is imported."""
        handler = _loaded_handler()
        if handler is None:
            return
        self._were_added = True
        if self._started not in handler.start_callbacks:
            handler.register_start_callback(self._started)
        if self._ended not in handler.end_callbacks:
            handler.register_end_callback(self._ended)
        logging.getLogger(_LIMIT_LOG).addHandler(self._refusals)

    def remove(self) -> None:
        """Remove those that are there."""
        self._were_added = False
        handler = _loaded_handler()
        if handler is None:
            return
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
    import torch._dynamo  # takes seconds

    handler: Any = torch._dynamo.callback.callback_handler
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


def _loaded_handler() -> Any:
    # None before the program imports Dynamo, and while it is being imported.
    return getattr(sys.modules.get(_CALLBACKS), "callback_handler", None)
