"""An engine in a thread of its own, for any number of threads and coroutines."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from types import TracebackType

from compiled_attn.cache.blocks.prefix import Salt
from compiled_attn.engine.config import ConfigError
from compiled_attn.engine.engine import Engine
from compiled_attn.engine.handle import RequestHandle
from compiled_attn.engine.owner import Owner, Seen
from compiled_attn.engine.prompts import token_ids
from compiled_attn.engine.sampling import SamplingParams

__all__ = ["AsyncEngine"]

_EXIT_SECONDS = 5.0  # that an exit of the interpreter waits for the step that runs


class AsyncEngine:
    """Serves requests from any thread and coroutine, in a thread that owns an `Engine`.

    An exception of one request is that request's. One of the engine itself (a step that fails)
    ends the service: it reaches every request that is open, and whoever submits later. A process
    that is forked from this one has no engine.

    Args:
        engine: that nobody else uses until this has stopped. It is warmed up in its thread if it is
            not yet; requests may come meanwhile.
        max_waiting: requests that wait at most, beyond the `max_seqs` that run.
        progress: called in its thread with an event per bucket, see `Engine.warmup`.

    Raises:
        ConfigError: ``max_waiting`` is below 0.

    Example::

        with AsyncEngine(engine) as serving:
            handle = serving.submit(prompt, SamplingParams(max_new_tokens=32))
            for event in handle:
                print(event.token)
            print(handle.result().finish_reason)

    ``async with`` and ``async for`` do the same in a coroutine. Leaving the block serves what was
    submitted; leaving it by an exception does not.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_waiting: int = 1024,
        progress: Callable[..., None] | None = None,
    ) -> None:
        if max_waiting < 0:
            raise ConfigError(f"expected max_waiting >= 0, got {max_waiting}: choose a larger one")
        self.engine = engine
        self._owner = Owner(engine, max_waiting, progress)
        # One that is dropped, or left at exit, stops; its open handles keep it.
        weakref.finalize(self, self._owner.stop, drain=False, timeout=_EXIT_SECONDS)

    def submit(
        self,
        prompt: SequenceOf[int],
        sampling: SamplingParams | None = None,
        *,
        salt: Salt = None,
    ) -> RequestHandle:
        """Queues a request, and returns the handle that its tokens and result are read from.

        Args:
            prompt, sampling, salt: see `Engine.submit`.

        Raises:
            ConfigError: the request can never be served.
            QueueFull: ``max_waiting`` requests wait.
            EngineStopped: it was stopped, has failed, or is another process's.
        """
        tokens, sampling = token_ids(prompt), sampling or SamplingParams()
        self.engine._check(tokens, sampling, salt, None)
        handle = RequestHandle(tokens, sampling, salt, time.perf_counter(), self._drop)
        self._owner.take(handle)
        return handle

    def look(self, look: Callable[[Engine], Seen]) -> Seen:
        """What a look at the engine gives, such as ``serving.look(Engine.report)``: between two
        steps, in its thread.

        Raises:
            EngineStopped: it was stopped, has failed, or is another process's.
        """
        return self._owner.look(look)

    def stop(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        """Takes no more requests, and ends the thread; from any thread, and as often as one likes.

        Args:
            drain: serve what was submitted; False: end that with `EngineStopped` after the step
                that runs, also where another call waits for it to be served.
            timeout: seconds to wait; None: as long as it takes.

        Returns:
            Whether the thread has ended. The engine can then be used again.
        """
        return self._owner.stop(drain=drain, timeout=timeout)

    @property
    def is_serving(self) -> bool:
        """Whether it takes requests."""
        return self._owner.is_serving

    def _drop(self, handle: RequestHandle) -> None:
        self._owner.drop(handle)

    def __enter__(self) -> AsyncEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop(drain=kind is None)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.stop, drain=kind is None)
