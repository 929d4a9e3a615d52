"""The thread that owns an engine: it runs the steps, other threads queue requests for it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import torch

from compiled_attn.cache.blocks.prefix import Salt
from compiled_attn.engine.adapters import NamedAdapters, ServedAdapter
from compiled_attn.engine.config import ConfigError, EngineConfig
from compiled_attn.engine.handle import RequestHandle, wake
from compiled_attn.engine.request_state import TokenEvent
from compiled_attn.engine.sampling import SamplingParams
from compiled_attn.errors import EngineStopped, QueueFull, RequestCancelled
from graphs import WarmupReport

__all__ = ["OwnedEngine", "Owner"]

Seen = TypeVar("Seen")

_REMEDY = "make another AsyncEngine"


class OwnedEngine(Protocol):
    """What an `Owner` needs of an engine."""

    adapters: NamedAdapters
    config: EngineConfig
    warmup_report: WarmupReport | None

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to compute or to return."""

    def warmup(self, progress: Callable[..., None] | None = None) -> WarmupReport:
        """Captures the graphs."""

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        salt: Salt = None,
        arrived_s: float | None = None,
        adapter: ServedAdapter | None = None,
    ) -> int:
        """Queues a request and returns its id."""

    def step(self) -> list[TokenEvent]:
        """Computes one step and returns its tokens."""

    def take_events(self) -> list[TokenEvent]:
        """Removes and returns the events of a step that raised an exception."""

    def abort(self, request_id: int) -> None:
        """Drops a request; raises KeyError if it is not open."""


class Owner:
    """Serves requests in a thread of its own until it is stopped.

    The thread sleeps while there is nothing to do. It is a daemon, so that it does not keep the
    interpreter from exiting.
    """

    def __init__(
        self, engine: OwnedEngine, max_waiting: int, progress: Callable[..., None] | None
    ) -> None:
        self._engine = engine
        self._max_waiting = max_waiting
        self._progress = progress
        self._settings = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._process = os.getpid()
        self._changed = threading.Condition()  # guards what follows, except the thread's own
        self._inbox: deque[RequestHandle] = deque()
        self._cancelled: deque[RequestHandle] = deque()
        self._calls: deque[tuple[Callable[[Any], Any], Future[Any]]] = deque()
        self._stop_after: str | None = None  # "all" requests, or "step"
        self._why_ended: EngineStopped | None = None
        # The thread's own: these wait for a grammar or for another request.
        self._outside: list[RequestHandle] = []
        engine.adapters.waiting = self._outside
        self._open: dict[int, RequestHandle] = {}  # the thread's own
        self._is_stepping = False  # the thread's own
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def is_serving(self) -> bool:
        """Whether it takes requests."""
        return os.getpid() == self._process and self._why_stopped() is None

    @property
    def most(self) -> int:
        """Requests that it accepts at a time."""
        return self._max_waiting + self._engine.config.max_seqs

    def take(self, handles: Sequence[RequestHandle]) -> None:
        """Queues requests, all of them or none; raises QueueFull if too many wait."""
        with self._while_serving():
            open_count = len(self._inbox) + len(self._outside) + len(self._open)
            if open_count + len(handles) > self.most:
                more = (
                    "one more" if len(handles) == 1 else f"{len(handles)} more that belong together"
                )
                raise QueueFull(
                    f"expected at most {self._max_waiting} requests that wait (max_waiting) while "
                    f"{self._engine.config.max_seqs} run (max_seqs), got {more}: submit it later, "
                    "or raise either"
                )
            self._inbox.extend(handles)
            self._changed.notify()

    def notify(self) -> None:
        """Wakes the thread: a grammar is compiled."""
        with self._changed:
            self._changed.notify()

    def drop(self, handle: RequestHandle) -> None:
        """Cancels a request, if it has not finished by then."""
        if os.getpid() != self._process:
            return
        with self._changed:
            self._cancelled.append(handle)
            self._changed.notify()

    def call(self, function: Callable[[Any], Seen]) -> Seen:
        """Calls a function with the engine between two steps; at once in the engine thread."""
        seen: Future[Seen] = Future()
        with self._while_serving():
            if not self._is_own_thread:
                self._calls.append((function, seen))
                self._changed.notify()
        if not self._is_own_thread:
            return seen.result()
        if self._is_stepping:
            raise RuntimeError(
                "expected a call between two steps, got one from within a step, which would wait "
                "for itself: call from another thread"
            )
        return function(self._engine)

    def stop(self, *, drain: bool, timeout: float | None) -> bool:
        """Stops the thread after all requests or the running step; returns whether it ended."""
        if os.getpid() != self._process:
            return True
        with self._changed:
            if self._stop_after != "step":
                self._stop_after = "all" if drain else "step"
            self._changed.notify()
        if not self._is_own_thread:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def refuse_fork(self) -> None:
        """Raises EngineStopped in a forked process, which does not have the thread."""
        if os.getpid() != self._process:
            raise EngineStopped(
                "expected the process that made the engine, got one forked from it, where no "
                f"thread serves: {_REMEDY} here"
            )

    def refuse_wait(self) -> None:
        """Raises an error where waiting for a request would never end."""
        self.refuse_fork()
        if self._is_own_thread:
            raise RuntimeError(
                "expected a thread that waits for the engine's, got the engine's own thread, which "
                "would wait for itself: read requests in another thread, or when they have finished"
            )

    @property
    def _is_own_thread(self) -> bool:
        return self._thread is threading.current_thread()

    @contextlib.contextmanager
    def _while_serving(self) -> Iterator[None]:
        """Holds the lock; raises EngineStopped if the thread does not serve."""
        self.refuse_fork()  # before the lock, which may be held forever there
        with self._changed:
            if (error := self._why_stopped()) is not None:
                raise error from error.__cause__
            yield

    def _why_stopped(self) -> EngineStopped | None:
        if self._why_ended is None and self._stop_after is None:
            return None
        cause = self._why_ended and self._why_ended.__cause__
        return _stopped("expected an engine that serves", cause)

    def _run(self) -> None:
        cause: BaseException | None = None
        is_grad, is_inference = self._settings
        try:
            with torch.inference_mode(is_inference), torch.set_grad_enabled(is_grad):
                if self._engine.warmup_report is None:
                    self._engine.warmup(self._report_progress)
                while self._has_work():
                    calls = len(self._calls)  # what was submitted before these enters first
                    self._enter_all()
                    self._drop_cancelled()
                    self._run_calls(calls)
                    if self._engine.has_work:
                        self._deliver(self._step())
        except _StoppedEarly:
            pass
        except BaseException as error:
            cause = error
        self._end(cause)

    def _step(self) -> list[TokenEvent]:
        self._is_stepping = True
        try:
            return self._engine.step()
        finally:
            self._is_stepping = False

    def _report_progress(self, *event: Any) -> None:
        if self._progress is not None:
            self._progress(*event)
        if self._stop_after == "step":
            raise _StoppedEarly

    def _has_work(self) -> bool:
        """Waits for work; False if there is none left, or it must stop."""
        with self._changed:
            while True:
                may_enter = bool(self._inbox) or any(each.may_enter for each in self._outside)
                has_work = may_enter or self._engine.has_work
                is_done = not (has_work or self._outside)
                if self._stop_after == "step" or (self._stop_after and is_done):
                    return False
                if has_work or self._cancelled or self._calls:
                    return True
                self._changed.wait()

    def _enter_all(self) -> None:
        with self._changed:
            accepted = [*self._inbox]
            self._outside += accepted
            self._inbox.clear()
        for handle in accepted:
            try:
                handle.adapter = self._engine.adapters.of(handle.sampling.adapter)
            except ConfigError as error:  # it was removed after the check
                self._outside.remove(handle)
                handle.fail(error)
                wake([handle])
        for handle in [each for each in self._outside if each.may_enter]:
            self._outside.remove(handle)
            try:
                self._enter(handle)
            except Exception as error:  # such as of a bucket that the warmup lost
                handle.fail(error)
                wake([handle])
            except BaseException:
                self._outside.append(handle)  # where `_end` finds it
                raise

    def _enter(self, handle: RequestHandle) -> None:
        if handle.compiled is not None:
            handle.compiled.result()
        handle.request_id = self._engine.submit(
            handle.prompt, handle.sampling, salt=handle.salt, arrived_s=handle.arrived_s,
            adapter=handle.adapter,
        )  # fmt: skip
        self._open[handle.request_id] = handle

    def _drop_cancelled(self) -> None:
        for _ in range(len(self._cancelled)):
            handle = self._cancelled.popleft()
            error = RequestCancelled(
                "expected a running request, got a cancelled one: submit it again"
            )
            if handle in self._outside:
                handle.fail(error)
                self._outside.remove(handle)
                wake([handle])
            elif handle.request_id is None and not handle.has_finished:
                self._cancelled.append(handle)  # submitted since
            elif handle.request_id in self._open:
                self._abort(handle, error)

    def _run_calls(self, count: int) -> None:
        for _ in range(count):
            function, seen = self._calls.popleft()
            try:
                seen.set_result(function(self._engine))
            except Exception as error:  # of the function
                seen.set_exception(error)
            except BaseException:
                self._calls.appendleft((function, seen))  # where `_end` finds it
                raise

    def _deliver(self, events: list[TokenEvent]) -> None:
        """Delivers the tokens of a step, without a lock; wakes each reader once."""
        waiting = []
        for event in events:
            if (handle := self._open.get(event.request_id)) is None:
                continue
            if handle.put(event):
                waiting.append(handle)
            if event.result is not None:
                del self._open[event.request_id]
        wake(waiting)

    def _abort(self, handle: RequestHandle, error: Exception) -> None:
        assert handle.request_id is not None
        del self._open[handle.request_id]
        try:
            with contextlib.suppress(KeyError):  # it finished in a step that failed
                self._engine.abort(handle.request_id)
        finally:
            handle.fail(error)
            wake([handle])

    def _end(self, cause: BaseException | None) -> None:
        """Fails every request and call, and refuses later ones."""
        got = "expected a request that is served to its end"
        with self._changed:
            self._why_ended = _stopped(got, cause)
            inbox = [*self._outside, *self._inbox]
            self._outside.clear()
            self._inbox.clear()
            calls = [*self._calls]
            self._calls.clear()
        for handle in inbox:
            handle.fail(_stopped(got, cause))
        wake(inbox)
        for _, seen in calls:
            seen.set_exception(_stopped(got, cause))
        self._deliver(self._engine.take_events())
        for handle in [*self._open.values()]:
            with contextlib.suppress(BaseException):  # of an engine that cannot continue
                self._abort(handle, _stopped(got, cause))


class _StoppedEarly(Exception):
    """The owner was stopped during the warmup."""


def _stopped(expected: str, cause: BaseException | None) -> EngineStopped:
    got = f"that failed ({type(cause).__name__}: {cause})" if cause else "that was stopped"
    error = EngineStopped(f"{expected}, got an engine {got}: {_REMEDY}")
    error.__cause__ = cause
    return error
