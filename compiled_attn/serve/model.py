"""The served model: it loads and warms up in a thread of its own, then answers requests."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import TypeAlias

from compiled_attn.engine import AsyncEngine
from compiled_attn.serve.grammar_queue import GrammarQueue
from compiled_attn.serve.http_errors import RequestError
from compiled_attn.text import LLM
from graphs import BucketEvent

__all__ = ["LoadModel", "ServedModel"]

LoadModel: TypeAlias = Callable[[Callable[[BucketEvent], None]], LLM]
"""Loads a model and warms it up; calls its argument with the event of each bucket."""


class ServedModel:
    """A model under a name, loading or ready.

    Args:
        name: that requests must give.
        load_model: see `LoadModel`.

    Attributes:
        error: the exception that ended loading; None if there was none.
        open_requests: HTTP requests that are being answered.
        is_draining: whether the server is being stopped.
        grammars: compiles the grammars of requests.
    """

    def __init__(self, name: str, load_model: LoadModel) -> None:
        self.name = name
        self.error: BaseException | None = None
        self.open_requests = 0
        self.is_draining = False
        self.grammars = GrammarQueue(lambda grammar: self.llm.grammars.compiled(grammar))
        self._load_model = load_model
        self._llm: LLM | None = None
        self._engine: AsyncEngine | None = None
        self._stage = "loading the model"
        self._loading: threading.Thread | None = None
        self._is_canceled = False

    def start(self, on_error: Callable[[], None]) -> None:
        """Loads in a thread of its own; calls ``on_error`` if that raises."""
        self._loading = threading.Thread(
            target=self._start, args=(on_error,), name="compiled-attn start", daemon=True
        )
        self._loading.start()

    def cancel_start(self, timeout: float) -> bool:
        """Ends loading after the graph that is being captured; waits ``timeout`` seconds for that.

        Returns whether no thread loads or compiles a grammar any more; the latter goes on.
        """
        self._is_canceled = True
        if self._loading is None:
            return self.grammars.is_idle
        self._loading.join(timeout)
        return not self._loading.is_alive() and self.grammars.is_idle

    def load(self) -> None:
        """Loads the model in this thread; afterwards it is ready."""
        llm = self._load_model(self._on_bucket)
        self._engine = AsyncEngine(llm.engine)
        self._llm = llm  # last: now it is ready

    def stop(self) -> None:
        """Stops the engine after it has served its open requests."""
        if self._engine is not None:
            self._engine.stop()

    @property
    def names(self) -> list[str]:
        """Names that requests may give: that of the model, then those of its adapters."""
        return [self.name, *([] if self._llm is None else self._llm.engine.adapters.names)]

    @property
    def running_requests(self) -> int:
        """Requests in the engine that make tokens, at this moment."""
        return len(self.llm.engine.scheduler.running)

    @property
    def stage(self) -> str:
        """Such as ``ready``, ``warming up, 5 of 9 graphs`` or ``draining, 2 requests open``."""
        if self._engine is None:
            return self._stage
        if self.is_draining:
            return f"draining, {self.open_requests} requests open"
        return "ready" if self._engine.is_serving else "stopped"

    def check_accepts_requests(self) -> None:
        """Raises RequestError, 503, if the server is being stopped or the model is loading."""
        if self.is_draining:
            raise RequestError(
                "expected a server that accepts requests, got one that stops: ask another", 503
            )
        assert self.llm is not None

    @property
    def llm(self) -> LLM:
        """The model with its tokenizer.

        Raises:
            RequestError: 503, while it is loading.
        """
        if self._llm is None:
            raise RequestError(f"expected a model that is warm, got {self._stage}: try again", 503)
        return self._llm

    @property
    def engine(self) -> AsyncEngine:
        """The engine that answers; raises as `llm` does."""
        assert self.llm is not None and self._engine is not None
        return self._engine

    def _start(self, on_error: Callable[[], None]) -> None:
        try:
            self.load()
            # Else a full collection, which visits the model too, stops every thread for 0.5 s.
            gc.collect()
            gc.freeze()
        except BaseException as error:
            self.error = error
            on_error()

    def _on_bucket(self, event: BucketEvent) -> None:
        if self._is_canceled:
            raise _StartCanceled
        self._stage = f"warming up, {event.index} of {event.total} graphs"


class _StartCanceled(Exception):
    pass
