"""The model that is served: it loads and warms up in a thread of its own, then answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from compiled_attn.engine import AsyncEngine
from compiled_attn.serve.errors import RequestError
from compiled_attn.serve.grammar_queue import GrammarQueue
from compiled_attn.text import LLM
from graphs import BucketEvent

if TYPE_CHECKING:
    from compiled_attn.serve.metrics import Metrics

__all__ = ["Make", "Served"]

Make: TypeAlias = Callable[[Callable[[BucketEvent], None]], LLM]
"""Loads a model and warms it up; told each bucket."""


class Served:
    """A model under its name, on its way or ready.

    Args:
        name: that requests name.
        make: loads it and warms it up.

    Attributes:
        error: what ended the start, None while nothing did.
        metrics: of its requests.
        open_requests: HTTP requests that are being answered.
        grammars: those that requests wait for.
    """

    metrics: Metrics

    def __init__(self, name: str, make: Make) -> None:
        self.name = name
        self.error: BaseException | None = None
        self.open_requests = 0
        self.grammars = GrammarQueue(lambda grammar: self.llm.grammars.compiled(grammar))
        self.is_draining = False
        self._make = make
        self._llm: LLM | None = None
        self._engine: AsyncEngine | None = None
        self._stage = "loading the model"
        self._starting: threading.Thread | None = None
        self._is_given_up = False

    def start(self, when_failed: Callable[[], None]) -> None:
        """Begins in a thread of its own; calls ``when_failed`` if that ends with an error."""
        self._starting = threading.Thread(
            target=self._start, args=(when_failed,), name="compiled-attn start", daemon=True
        )
        self._starting.start()

    def give_up(self, seconds: float) -> bool:
        """Ends a start behind the graph that it is at; whether that came within so long, and no
        grammar is being compiled, which nothing can end.
        """
        self._is_given_up = True
        if self._starting is not None:
            self._starting.join(seconds)
        has_started = self._starting is None or not self._starting.is_alive()
        return has_started and self.grammars.is_idle

    def load(self) -> None:
        """Loads it and warms it up; then it is ready.

        Raises:
            Exception: what ended that.
        """
        llm = self._make(self._told)
        self._engine = AsyncEngine(llm.engine)
        self._llm = llm  # last: now it is ready

    def stop(self) -> None:
        """Ends the engine; what is running is served before."""
        if self._engine is not None:
            self._engine.stop()

    @property
    def stage(self) -> str:
        """``ready``; what it waits for, ``warming up, 5 of 9 graphs``; ``draining, 2 requests
        open``; or ``stopped``.
        """
        if self._engine is None:
            return self._stage
        if self.is_draining:
            return f"draining, {self.open_requests} requests open"
        return "ready" if self._engine.is_serving else "stopped"

    def refuse_while_draining(self) -> None:
        """Raises RequestError, 503, once the server is being stopped."""
        if self.is_draining:
            raise RequestError(
                "expected a server that goes on, got one that stops: ask another", 503
            )

    @property
    def llm(self) -> LLM:
        """The model with its tokenizer.

        Raises:
            RequestError: 503, while it is on its way.
        """
        if self._llm is None:
            raise RequestError(f"expected a model that is warm, got {self._stage}: try again", 503)
        return self._llm

    @property
    def engine(self) -> AsyncEngine:
        """What answers; raises as `llm` does."""
        assert self.llm is not None
        assert self._engine is not None
        return self._engine

    def _start(self, when_failed: Callable[[], None]) -> None:
        try:
            self.load()
        except BaseException as error:
            self.error = error
            when_failed()

    def _told(self, event: BucketEvent) -> None:
        if self._is_given_up:
            raise _GivenUp
        self._stage = f"warming up, {event.index} of {event.total} graphs"


class _GivenUp(Exception):
    """Nobody waits for the start any more."""
