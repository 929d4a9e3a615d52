"""A workload of requests, and the stream of tokens that serves it."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from numbers import Integral
from typing import Any, Protocol

from compiled_attn.cache.blocks.prefix import Salt
from compiled_attn.engine.config import ConfigError
from compiled_attn.engine.report import StepInfo
from compiled_attn.engine.request_state import GenerationResult, TokenEvent
from compiled_attn.engine.sampling import SamplingParams, token_ids

__all__ = ["Stream", "Workload", "results_of"]

_FOREVER = 1e9


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests with their sampling and arrival times; each continuation of a prompt is one.

    Args:
        names: index of the prompt of each request, and which of its continuations it is.
        prompts: token ids of each request.
        sampling: how each is continued.
        salts: requests of equal salt may share blocks.
        arrivals: seconds from the start at which each arrives (open loop); None: all at once.
        concurrency: requests in flight at most (closed loop); None: no limit.
    """

    names: Sequence[tuple[int, int]]
    prompts: Sequence[list[int]]
    sampling: Sequence[SamplingParams]
    salts: Sequence[Salt]
    arrivals: Sequence[float] | None
    concurrency: int | None

    @staticmethod
    def of(
        prompts: Any,
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        salt: Salt | Sequence[Salt],
        arrivals: Sequence[float] | None,
        concurrency: Any,
    ) -> Workload:
        """Makes a workload; a single sampling or salt applies to all requests.

        Raises:
            ConfigError: prompts are not token ids, numbers of prompts, samplings, salts and
                arrivals differ, or concurrency < 1.
        """
        tokens = _all_token_ids(prompts)
        if concurrency is not None and not (
            isinstance(concurrency, Integral) and int(concurrency) >= 1
        ):
            raise ConfigError(f"expected concurrency: None or an integer >= 1, got {concurrency!r}")
        sampling = SamplingParams() if sampling is None else sampling
        params = _one_each(sampling, SamplingParams, len(tokens), "SamplingParams")
        salts = _one_each(salt, (str, bytes, type(None)), len(tokens), "salts")
        times = None if arrivals is None else _seconds(arrivals, len(tokens))
        names = [
            (at, choice)
            for at, each in enumerate(params)
            for choice in range(getattr(each, "n", 1))
        ]
        return Workload(
            names,
            [[*tokens[at]] for at, _ in names],
            [_continuation(params[at], choice) for at, choice in names],
            [salts[at] for at, _ in names],
            None if times is None else [times[at] for at, _ in names],
            None if concurrency is None else int(concurrency),
        )

    def others(self, at: int) -> list[int]:
        """Returns the further continuations of a prompt, given its first."""
        index, choice = self.names[at]
        same = takewhile(lambda other: self.names[other][0] == index, range(at, len(self.names)))
        return [] if choice else [*same][1:]


def _continuation(sampling: Any, choice: int) -> Any:
    """One of the continuations; the check of a prompt refuses what is not `SamplingParams`."""
    return sampling.continuation(choice) if isinstance(sampling, SamplingParams) else sampling


class StreamEngine(Protocol):
    """What a `Stream` needs of an engine."""

    is_streaming: bool

    @property
    def open_requests(self) -> set[int]:
        """Ids of the requests that wait or run."""

    def enter(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        salt: Salt,
        arrived_s: float | None,
        events: deque[TokenEvent],
        name: tuple[int, int],
    ) -> int:
        """Queues a request whose events go to a queue, and returns its id."""

    def advance(self) -> None:
        """Computes one step."""

    def has_started(self, request_id: int) -> bool:
        """Whether the prompt of a request was computed, or it has finished."""

    def drop(self, request_ids: set[int]) -> None:
        """Aborts those of the requests that are open."""

    def info(self, elapsed_s: float) -> StepInfo:
        """Returns the state of the engine."""


class Stream(Iterator[TokenEvent]):
    """Serves a workload while it is iterated over; yields the tokens of its own requests.

    A reader that stops early (`close`, or dropping it) aborts the requests that are still open, and
    so does an exception in a step; events that exist by then can still be read. Requests of others
    are computed along the way.

    Args:
        engine: serves it.
        workload: requests that can all be served.
        on_step: called after every step.

    Raises:
        RuntimeError: at its first token, if another stream is open; it can be read when that has
            finished.
    """

    def __init__(
        self, engine: StreamEngine, workload: Workload, on_step: Callable[[StepInfo], None] | None
    ) -> None:
        self._engine, self._workload, self._on_step = engine, workload, on_step
        self._events: deque[TokenEvent] = deque()
        self._is_open = self._has_finished = False
        self._started_s = 0.0
        self._in_flight: set[int] = set()
        arrivals, names = workload.arrivals, workload.names
        self._times = [0.0] * len(names) if arrivals is None else arrivals
        firsts = (at for at, (_, choice) in enumerate(names) if not choice)
        self._queue = deque(sorted(firsts, key=self._times.__getitem__))
        self._others: dict[int, list[int]] = {}  # wait for the request that computes their prompt

    @property
    def names(self) -> Sequence[tuple[int, int]]:
        """Index and continuation of each request."""
        return self._workload.names

    def __next__(self) -> TokenEvent:
        while not self._events:
            if self._has_finished:
                raise StopIteration
            if not self._is_open:
                self._open()
            try:
                self._step()
            except BaseException:
                self.close()
                raise
        return self._events.popleft()

    def close(self) -> None:
        """Aborts open requests; after the step, if it is called during one."""
        if self._is_open:
            self._is_open = self._engine.is_streaming = False
        self._has_finished = True
        self._engine.drop(self._in_flight)

    def __del__(self) -> None:
        self.close()

    def _open(self) -> None:
        if self._engine.is_streaming:
            raise RuntimeError(
                "expected an idle engine, but it serves another stream: finish or close that first"
            )
        self._is_open = self._engine.is_streaming = True
        self._started_s = time.perf_counter()

    def _step(self) -> None:
        """Submits what is due and computes a step, or waits for the next arrival."""
        engine, times = self._engine, self._times
        elapsed = time.perf_counter() - self._started_s
        for first in [each for each in self._others if engine.has_started(each)]:
            self._queue.extendleft(reversed(self._others.pop(first)))
        limit = self._workload.concurrency or len(times)
        while self._queue and times[self._queue[0]] <= elapsed and len(self._in_flight) < limit:
            self._submit(self._queue.popleft())
        if self._in_flight & engine.open_requests:
            engine.advance()
            if self._on_step is not None:
                self._on_step(engine.info(time.perf_counter() - self._started_s))
        elif self._queue and not self._in_flight:
            time.sleep(times[self._queue[0]] - elapsed)
        self._in_flight &= engine.open_requests
        if self._has_finished or not (self._queue or self._in_flight or self._others):
            self.close()

    def _submit(self, at: int) -> None:
        workload = self._workload
        request_id = self._engine.enter(
            workload.prompts[at],
            workload.sampling[at],
            workload.salts[at],
            None if workload.arrivals is None else self._started_s + self._times[at],
            self._events,
            workload.names[at],
        )
        self._in_flight.add(request_id)
        if others := workload.others(at):
            self._others[request_id] = others


def results_of(stream: Stream, *, in_order: bool) -> Iterator[GenerationResult]:
    """Yields the results of a stream, as they finish or in the order of the prompts."""
    with contextlib.closing(stream):
        finished = (event.result for event in stream if event.result is not None)
        yield from _in_order(finished, stream.names) if in_order else finished


def _in_order(
    results: Iterable[GenerationResult], names: Iterable[tuple[int, int]]
) -> Iterator[GenerationResult]:
    early: dict[tuple[int, int], GenerationResult] = {}
    waiting = deque(names)
    for result in results:
        early[result.index, result.choice] = result
        while waiting and waiting[0] in early:
            yield early.pop(waiting.popleft())
    yield from (early[name] for name in sorted(early))  # after one that was aborted


def _all_token_ids(prompts: Any) -> list[list[int]]:
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
        raise ConfigError(
            f"expected a list of prompts, each a list of token ids, got {type(prompts).__name__}: "
            "tokenize first, and put a single prompt into a list"
        )
    return [token_ids(prompt) for prompt in prompts]


def _one_each(given: Any, one: type | tuple[type, ...], count: int, name: str) -> list[Any]:
    """A list of ``count``: the given values, or a single one repeated."""
    if isinstance(given, one):
        return [given] * count
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        raise ConfigError(f"expected {name}, one or one per prompt, got {type(given).__name__}")
    values = list(given)
    if len(values) != count:
        raise ConfigError(f"expected {count} {name}, one per prompt, got {len(values)}")
    return values


def _seconds(arrivals: Any, count: int) -> list[float]:
    values = _one_each(arrivals, (), count, "arrivals")
    try:
        seconds = [float(value) for value in values]
    except (TypeError, ValueError, OverflowError):
        seconds = [-1.0]
    if not all(0 <= at < _FOREVER for at in seconds):
        raise ConfigError("expected arrivals in seconds, of at least 0 and below 31 years")
    return seconds
