"""A stream of tokens, and the requests that it serves."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple, Protocol

from compiled_attn.cache.blocks.prefix import Salt
from compiled_attn.engine.config import ConfigError
from compiled_attn.engine.logprobs import RowResult
from compiled_attn.engine.report import StepInfo
from compiled_attn.engine.request_state import GenerationResult, RequestState, TokenEvent
from compiled_attn.engine.sampling import SamplingParams, token_ids

__all__ = ["PlannedRequest", "Stream", "planned_requests", "results_of"]

_FOREVER = 1e9


class PlannedRequest(NamedTuple):
    """A request of a stream; each continuation of a prompt is one.

    Args:
        name: index of its prompt, and which of its continuations it is.
        arrival_s: seconds from the start at which it arrives (open loop); None: at once.
    """

    name: tuple[int, int]
    prompt: list[int]
    sampling: SamplingParams
    salt: Salt
    arrival_s: float | None


def planned_requests(
    prompts: Any,
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    salt: Salt | Sequence[Salt],
    arrivals: Sequence[float] | None,
    concurrency: Any,
) -> tuple[list[PlannedRequest], int]:
    """Returns the requests of a stream, and how many may be in flight; a single sampling or salt
    applies to all.

    Raises:
        ConfigError: prompts are not token ids, numbers of prompts, samplings, salts and arrivals
            differ, or concurrency < 1.
    """
    tokens = _all_token_ids(prompts)
    is_limit = isinstance(concurrency, Integral) and int(concurrency) >= 1
    if concurrency is not None and not is_limit:
        raise ConfigError(f"expected concurrency: None or an integer >= 1, got {concurrency!r}")
    sampling, count = SamplingParams() if sampling is None else sampling, len(tokens)
    params = _one_each(sampling, SamplingParams, count, "SamplingParams")
    salts = _one_each(salt, (str, bytes, type(None)), count, "salts")
    times: Sequence[float | None] = (
        [None] * count if arrivals is None else _seconds(arrivals, count)
    )
    requests = [
        PlannedRequest((at, choice), [*prompt], _continuation(each, choice), own, arrival_s)
        for at, (prompt, each, own, arrival_s) in enumerate(
            zip(tokens, params, salts, times, strict=True)
        )
        for choice in range(getattr(each, "n", 1))
    ]
    return requests, len(requests) if concurrency is None else int(concurrency)


def _continuation(sampling: Any, choice: int) -> Any:
    """One of the continuations; the check of a prompt refuses what is not `SamplingParams`."""
    return sampling.continuation(choice) if isinstance(sampling, SamplingParams) else sampling


class _Engine(Protocol):  # the engine imports this module
    is_streaming: bool

    @property
    def open_requests(self) -> set[int]: ...
    def enter(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        salt: Salt,
        arrived_s: float | None,
        events: deque[TokenEvent],
        name: tuple[int, int],
    ) -> int: ...
    def advance(self) -> None: ...
    def has_started(self, request_id: int) -> bool: ...
    def drop(self, request_ids: set[int]) -> None: ...
    def info(self, elapsed_s: float) -> StepInfo: ...


class Stream(Iterator[TokenEvent]):
    """Serves requests while it is iterated over; yields their tokens.

    A reader that stops early (`close`, or dropping it) aborts the requests that are still open, and
    so does an exception in a step; events that exist by then can still be read. Requests of others
    are computed along the way.

    Args:
        requests: can all be served; one that no longer can when it is due ends with an error.
        limit: requests in flight at most (closed loop).
        on_step: called after every step.

    Raises:
        RuntimeError: at its first token, if another stream is open; it can be read when that has
            finished.
    """

    def __init__(
        self,
        engine: _Engine,
        requests: Sequence[PlannedRequest],
        limit: int,
        on_step: Callable[[StepInfo], None] | None,
    ) -> None:
        self._engine, self._limit, self._on_step = engine, limit, on_step
        self.names = [each.name for each in requests]
        self._events: deque[TokenEvent] = deque()
        self._is_open = self._has_finished = False
        self._started_s = 0.0
        self._in_flight: set[int] = set()
        # The first continuation of a prompt computes it, and the others wait for that.
        first_choices = [each for each in requests if not each.name[1]]
        self._queue = deque(sorted(first_choices, key=_due_s))
        self._later = {first.name[0]: deque[PlannedRequest]() for first in first_choices}
        for each in requests:
            if each.name[1]:
                self._later[each.name[0]].append(each)
        self._waiting: dict[int, deque[PlannedRequest]] = {}  # by the id of the first

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
        engine, queue = self._engine, self._queue
        elapsed = time.perf_counter() - self._started_s
        for first in [each for each in self._waiting if engine.has_started(each)]:
            queue.extendleft(reversed(self._waiting.pop(first)))
        while queue and _due_s(queue[0]) <= elapsed and len(self._in_flight) < self._limit:
            self._submit(queue.popleft())
        if self._in_flight & engine.open_requests:
            engine.advance()
            if self._on_step is not None:
                self._on_step(engine.info(time.perf_counter() - self._started_s))
        elif queue and not self._in_flight:
            time.sleep(_due_s(queue[0]) - elapsed)
        self._in_flight &= engine.open_requests
        if self._has_finished or not (queue or self._in_flight or self._waiting):
            self.close()

    def _submit(self, request: PlannedRequest) -> None:
        name, prompt, sampling, salt, arrival_s = request
        arrived_s = None if arrival_s is None else self._started_s + arrival_s
        later = self._later.pop(name[0], None)
        try:
            request_id = self._engine.enter(prompt, sampling, salt, arrived_s, self._events, name)
        except ConfigError as error:  # such as of an adapter that was removed meanwhile
            self._events.append(_refused(request, error))
            self._queue.extendleft(reversed(later or ()))
            return
        self._in_flight.add(request_id)
        if later:
            self._waiting[request_id] = later


def _refused(request: PlannedRequest, error: ConfigError) -> TokenEvent:
    now_s, (index, choice) = time.perf_counter(), request.name
    state = RequestState(
        -1, request.prompt, len(request.prompt), request.sampling, now_s, index=index, choice=choice
    )
    return state.event(RowResult(error=str(error)), 0, now_s, "error")


def _due_s(request: PlannedRequest) -> float:
    return request.arrival_s or 0.0


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
