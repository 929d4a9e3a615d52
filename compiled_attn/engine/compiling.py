"""Grammars that compile apart from whoever asks for them, one at a time."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from compiled_attn.engine.constraint import Grammars
from compiled_attn.engine.grammar import Grammar
from compiled_attn.errors import QueueFull

__all__ = ["Compiling"]

_MOST_WAITING, _KEPT = 16, 48


class Compiling:
    """Compiles each grammar once, in threads that keep no interpreter from its exit.

    Args:
        grammars: what compiles them, and keeps what it compiled.
    """

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._begun: dict[Grammar, Future[None]] = {}

    def begin(self, grammar: Grammar) -> Future[None]:
        """Done when the grammar is compiled; with the error that it is refused with.

        Raises:
            QueueFull: too many others wait to be compiled.
        """
        with self._lock:
            if (known := self._begun.get(grammar)) is not None:
                return known
            if sum(not each.done() for each in self._begun.values()) >= _MOST_WAITING:
                raise QueueFull(
                    f"expected at most {_MOST_WAITING} grammars that wait to be compiled, got one "
                    "more: submit it later"
                )
            future = self._begun[grammar] = Future[None]()
            done = [each for each, other in self._begun.items() if other.done()]
            for each in done[: len(self._begun) - _KEPT]:
                del self._begun[each]
        threading.Thread(
            target=self._compile, args=(grammar, future), name="grammar", daemon=True
        ).start()
        return future

    def _compile(self, grammar: Grammar, future: Future[None]) -> None:
        with self._turn:
            try:
                self._grammars.compiled(grammar)
            except BaseException as error:
                with self._lock:
                    del self._begun[grammar]  # it may be mended, as by an installation
                future.set_exception(error)
            else:
                future.set_result(None)
