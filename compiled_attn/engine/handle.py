"""The handle of a request that another thread serves: streams its tokens, and has its result."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from compiled_attn.cache.blocks.prefix import Salt
from compiled_attn.engine.adapters import ServedAdapter
from compiled_attn.engine.request_state import GenerationResult, TokenEvent
from compiled_attn.engine.sampling import SamplingParams

__all__ = ["RequestHandle", "wake"]


class _Server(Protocol):  # the owner imports this module
    def drop(self, handle: RequestHandle) -> None: ...
    def refuse_wait(self) -> None: ...


@dataclass(eq=False)
class RequestHandle:
    """A request of an `AsyncEngine`; `AsyncEngine.submit` returns it.

    Its tokens are read once, by one reader: ``for event in handle`` in any thread, or ``async for
    event in handle`` in any event loop. A reader that stops early (``break``, an exception, a
    coroutine that is cancelled) cancels the request. Any number of callers may wait for its end
    with `result` or ``await handle``; cancelling the coroutine that awaits it cancels it too.

    Args:
        prompt: token ids.
        sampling: how it is continued.
        salt: see `Engine.submit`.
        arrived_s: on the clock of `time.perf_counter`.
        server: serves it.
        keep_alive: an object that must live as long as the handle.
        compiled: done when its grammar is compiled, or refused; None: nothing to wait for.
        first: the continuation that computes its prompt, whose blocks it then shares; None: it
            computes its own.
    """

    prompt: list[int]
    sampling: SamplingParams
    salt: Salt
    arrived_s: float
    server: _Server = field(repr=False)
    keep_alive: object = field(repr=False)
    compiled: Future[None] | None = field(default=None, repr=False)
    first: RequestHandle | None = field(default=None, repr=False)
    has_begun: bool = field(default=False, init=False)
    """Whether its prompt was computed, or it has finished."""
    adapter: ServedAdapter | None = field(default=None, init=False, repr=False)
    """What its adapter's name meant when it was accepted."""
    request_id: int | None = field(default=None, init=False)
    """Its id in the engine, that of its events and its result; None before the engine has it."""
    _events: deque[TokenEvent] = field(default_factory=deque, init=False, repr=False)
    _end: GenerationResult | Exception | None = field(default=None, init=False, repr=False)
    _readers: deque[_Waiter] = field(default_factory=deque, init=False, repr=False)
    _enders: deque[_Waiter] = field(default_factory=deque, init=False, repr=False)

    @property
    def has_finished(self) -> bool:
        """Whether it has finished, was cancelled or failed; tokens may still be unread."""
        return self._end is not None

    @property
    def may_enter(self) -> bool:
        """Whether its engine can have it now."""
        is_compiled = self.compiled is None or self.compiled.done()
        return is_compiled and (self.first is None or self.first.has_begun)

    def cancel(self) -> None:
        """Cancels it, from any thread, at the latest after the running step; frees its blocks.

        Tokens that exist by then can still be read. A finished request stays as it is.
        """
        if self._end is None:
            self.server.drop(self)

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Waits for its end.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            RequestCancelled: it was cancelled.
            EngineStopped: its engine was stopped or failed.
            TimeoutError: it has not finished by then; it continues to run.
            RuntimeError: it has not finished, and this is the thread that serves it.
        """
        self._wait(self._enders, self._is_over, timeout)
        return self._end_result()

    def __iter__(self) -> Iterator[TokenEvent]:
        try:
            while True:
                self._wait(self._readers, self._has_news, None)
                if (event := self._take()) is None:
                    return
                yield event
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        try:
            while True:
                await self._arrived(self._readers, self._has_news)
                if (event := self._take()) is None:
                    return
                yield event
        finally:
            self.cancel()

    async def read(self) -> list[TokenEvent]:
        """Waits for tokens and returns all that are unread; none after the last.

        Raises as `result` does. A reader that stops early must call `cancel`.
        """
        await self._arrived(self._readers, self._has_news)
        events: list[TokenEvent] = []
        while (event := None if events and not self._events else self._take()) is not None:
            events.append(event)
        return events

    def __await__(self) -> Generator[Any, None, GenerationResult]:
        try:
            yield from self._arrived(self._enders, self._is_over).__await__()
        except BaseException:
            self.cancel()
            raise
        return self._end_result()

    def put(self, event: TokenEvent) -> bool:
        """Adds an event; for the serving thread. Returns whether a reader must be woken."""
        self._events.append(event)
        self.has_begun = True
        if event.result is not None:
            self._end = event.result
            return True
        return bool(self._readers)

    def fail(self, error: Exception) -> None:
        """Ends it without a result; for the serving thread, which then calls `wake`."""
        self._end, self.has_begun = error, True

    def waiters(self) -> Iterator[_Waiter]:
        """Removes and yields the waiters to wake; for `wake`."""
        for waiters in (self._readers, self._enders)[: 1 + self.has_finished]:
            while waiters:
                yield waiters.popleft()

    def _is_over(self) -> bool:
        return self._end is not None

    def _has_news(self) -> bool:
        return bool(self._events) or self._end is not None

    def _take(self) -> TokenEvent | None:
        """Returns the next event; None after the last."""
        end = self._end  # read before the events, which then include the last one
        if self._events:
            return self._events.popleft()
        if isinstance(end, Exception):
            raise end
        return None

    def _end_result(self) -> GenerationResult:
        if isinstance(self._end, Exception):
            raise self._end
        assert self._end is not None
        return self._end

    # A waiter registers before its last check of the condition, and the serving thread looks for
    # waiters after it changed the condition: so no wake-up is lost. A spurious one is harmless.

    def _wait(
        self, waiters: deque[_Waiter], is_there: Callable[[], bool], timeout: float | None
    ) -> None:
        seconds = -1 if timeout is None else max(0, timeout)
        while not is_there():
            self.server.refuse_wait()
            flag = threading.Lock()  # faster than an Event, and enough for one waiter
            flag.acquire()
            waiters.append(waiter := _Waiter(flag))
            if not is_there() and not flag.acquire(timeout=seconds):
                with contextlib.suppress(ValueError, IndexError):  # it was woken just now
                    waiters.remove(waiter)
                raise TimeoutError(
                    f"expected the request to finish within {timeout:g} s, got "
                    f"{len(self._events)} unread tokens by then: wait longer, or cancel it"
                )

    async def _arrived(self, waiters: deque[_Waiter], is_there: Callable[[], bool]) -> None:
        loop = asyncio.get_running_loop()
        while not is_there():
            self.server.refuse_wait()
            future = loop.create_future()
            waiters.append(_Waiter(future, loop))
            if not is_there():
                await future


class _Waiter:
    """A sleeping reader: a thread that blocks on a lock, or a coroutine that awaits a future."""

    __slots__ = ("flag", "loop")

    def __init__(self, flag: Any, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.flag, self.loop = flag, loop


def wake(handles: Iterable[RequestHandle]) -> None:
    """Wakes the waiters of these handles, those of one event loop together."""
    of_loops: dict[asyncio.AbstractEventLoop, list[tuple[RequestHandle, Any]]] = {}
    for handle in handles:
        for waiter in handle.waiters():
            if waiter.loop is None:
                waiter.flag.release()
            else:
                of_loops.setdefault(waiter.loop, []).append((handle, waiter.flag))
    for loop, those in of_loops.items():
        try:
            loop.call_soon_threadsafe(_resolve, [future for _, future in those])
        except RuntimeError:  # the loop is closed
            for handle, _ in those:
                handle.cancel()


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
