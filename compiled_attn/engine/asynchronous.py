"""An engine in a thread of its own, for any number of threads and coroutines."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType

from compiled_attn.cache.blocks.prefix import Salt
from compiled_attn.engine.config import ConfigError
from compiled_attn.engine.constraint import Grammars, without_grammars
from compiled_attn.engine.engine import Engine
from compiled_attn.engine.grammar import Grammar
from compiled_attn.engine.handle import RequestHandle
from compiled_attn.engine.owner import Owner, Seen
from compiled_attn.engine.sampling import SamplingParams, token_ids
from compiled_attn.errors import QueueFull
from graphs.errors import quoted

__all__ = ["AsyncEngine", "Compiling"]

_MOST_WAITING, _MOST_CACHED = 16, 48
_EXIT_SECONDS = 5.0  # the exit of the interpreter waits as long for the running step


class Compiling:
    """Compiles each grammar once, in daemon threads."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._begun: dict[Grammar, Future[None]] = {}

    def begin(self, grammar: Grammar) -> Future[None]:
        """Starts to compile a grammar; the future is done when it is compiled or refused.

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
            for each in done[: len(self._begun) - _MOST_CACHED]:
                del self._begun[each]
        try:
            threading.Thread(
                target=self._compile, args=(grammar, future), name="grammar", daemon=True
            ).start()
        except BaseException:  # such as no thread is left
            self._forget(grammar)
            raise
        return future

    def _compile(self, grammar: Grammar, future: Future[None]) -> None:
        with self._turn:
            try:
                self._grammars.compiled(grammar)
            except BaseException as error:
                self._forget(grammar)  # a later try may succeed, such as after an installation
                future.set_exception(error)
            else:
                future.set_result(None)

    def _forget(self, grammar: Grammar) -> None:
        with self._lock:
            self._begun.pop(grammar, None)


class AsyncEngine:
    """Serves requests from any thread and coroutine, in a thread that owns an `Engine`.

    An error of one request ends that request. An error of the engine itself (a step that fails)
    ends the service: every open request and later `submit` gets an `EngineStopped` that names it;
    so does `CorruptCache` of the sanitizer, its ``__cause__``, since the bug may have reached other
    requests. A forked process has no engine.

    Args:
        engine: not used by anything else until this has stopped. It is warmed up in its thread if
            it is not yet; requests may come meanwhile.
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
        self._compiling = None if engine.grammars is None else Compiling(engine.grammars)
        # Stops when it is dropped, or at exit; open handles keep it alive.
        weakref.finalize(self, self._owner.stop, drain=False, timeout=_EXIT_SECONDS)

    def submit(
        self, prompt: Sequence[int], sampling: SamplingParams | None = None, *, salt: Salt = None
    ) -> RequestHandle:
        """Queues a request as `Engine.submit` does; its handle streams tokens and has the result.

        Raises:
            ConfigError: the request can never be served.
            QueueFull: ``max_waiting`` requests wait.
            EngineStopped: it was stopped, has failed, or is of another process.

        A grammar is compiled in a thread of its own. This waits for it, except in a coroutine,
        where the handle has the error of a refused grammar.
        """
        return self._submitted([(prompt, [sampling or SamplingParams()])], salt)[0]

    def submit_together(
        self, requests: Sequence[tuple[Sequence[int], SamplingParams]], *, salt: Salt = None
    ) -> list[RequestHandle]:
        """Queues the ``n`` continuations of each prompt, all of them or none, see `submit`.

        The first of a prompt computes it, and the others wait to share its blocks.

        Args:
            requests: prompts, each with its sampling.

        Raises:
            ConfigError: something is not such a pair, or can never be served.
            QueueFull: more than ``max_waiting`` requests would wait.
            EngineStopped: it was stopped, has failed, or is of another process.
        """
        if not _are_pairs(requests):
            raise ConfigError(
                "expected a list of pairs, each of a prompt and SamplingParams, got "
                f"{quoted(requests)}: pass [(prompt, SamplingParams())]"
            )
        continued = [
            (prompt, [sampling.continuation(number) for number in range(sampling.n)])
            for prompt, sampling in requests
        ]
        return self._submitted(continued, salt)

    def compiled(self, grammar: Grammar) -> Future[None]:
        """Compiles a grammar in a thread of its own; the future is done when it is compiled or
        refused.
        """
        if self._compiling is None:
            raise without_grammars(grammar)
        return self._compiling.begin(grammar)

    def call(self, function: Callable[[Engine], Seen]) -> Seen:
        """Calls a function with the engine between two steps, in its thread, such as
        ``serving.call(Engine.report)``; at once if called in that thread (by ``progress``, say).

        Raises:
            EngineStopped: it was stopped, has failed, or is of another process.
            RuntimeError: it is called from within a step.
        """
        return self._owner.call(function)

    def stop(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        """Refuses further requests and ends the thread; from any thread, any number of times.

        Args:
            drain: serve what was submitted; False: end it with `EngineStopped` after the running
                step, even if another call waits for it to be served.
            timeout: seconds to wait; None: as long as it takes.

        Returns:
            Whether the thread has ended. The engine can then be used again.
        """
        return self._owner.stop(drain=drain, timeout=timeout)

    @property
    def most_requests(self) -> int:
        """Requests that it accepts at a time: ``max_seqs`` that run, and ``max_waiting``."""
        return self._owner.most

    @property
    def is_serving(self) -> bool:
        """Whether it accepts requests."""
        return self._owner.is_serving

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

    def _submitted(
        self, requests: Sequence[tuple[Sequence[int], Sequence[SamplingParams]]], salt: Salt
    ) -> list[RequestHandle]:
        now = time.perf_counter()
        checked = [
            (tokens := token_ids(prompt), each, self._checked(tokens, each[0], salt))
            for prompt, each in requests
        ]
        handles: list[RequestHandle] = []
        for tokens, each, compiled in checked:
            first: RequestHandle | None = None
            for sampling in each:
                handle = RequestHandle(
                    tokens, sampling, salt, now, self._owner, self, compiled, first
                )
                first = handle if first is None else first
                handles.append(handle)
        self._owner.take(handles)
        for compiled in {each for _, _, each in checked if each is not None}:
            compiled.add_done_callback(lambda _: self._owner.notify())
        return handles

    def _checked(
        self, tokens: list[int], sampling: SamplingParams, salt: Salt
    ) -> Future[None] | None:
        """Checks a request; returns the future of its grammar if that is not compiled yet."""
        grammar = getattr(sampling, "grammar", None)
        plain = sampling if grammar is None else replace(sampling, grammar=None)
        self.engine.check(tokens, plain, salt)
        if grammar is None:
            return None
        compiled = self.compiled(grammar)
        if not compiled.done() and _is_in_event_loop():
            return compiled
        compiled.result()
        return None


def _are_pairs(requests: object) -> bool:
    return isinstance(requests, Sequence) and all(
        isinstance(each, tuple) and len(each) == 2 and isinstance(each[1], SamplingParams)
        for each in requests
    )


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
