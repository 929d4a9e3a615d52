"""A workload, and the tokens that serving it gives, one after the other."""

from __future__ import annotations

import contextlib
import inspect
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias

from compiled_attn.cache.blocks.prefix import Salt
from compiled_attn.engine.config import ConfigError
from compiled_attn.engine.report import StepInfo
from compiled_attn.engine.request_state import GenerationResult, Mailbox, TokenEvent
from compiled_attn.engine.sampling import SamplingParams, token_ids

if TYPE_CHECKING:
    from compiled_attn.engine.engine import Engine

__all__ = ["Known", "Stream", "Workload", "ended", "refuse_second", "results_of"]

_FOREVER = 1e9

Known: TypeAlias = "list[tuple[weakref.ref[Stream], Mailbox[TokenEvent]]]"
"""The streams of an engine, of which at most one is open."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests with their sampling and arrival times: each continuation of a prompt is one.

    Args:
        names: index of the prompt of each request, and which of its continuations it is.
        prompts: token ids of each request.
        sampling: how each is continued.
        salts: which prompts may share blocks: those of equal salt.
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
        """The workload, with one sampling and one salt spread over all requests.

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
        """The further continuations of a prompt, given its first."""
        index, choice = self.names[at]
        same = takewhile(lambda other: self.names[other][0] == index, range(at, len(self.names)))
        return [] if choice else [*same][1:]


def _continuation(sampling: Any, choice: int) -> Any:
    """One of the continuations; what is not `SamplingParams` is refused later, with its prompt."""
    return sampling.continuation(choice) if isinstance(sampling, SamplingParams) else sampling


class Stream(Iterator[TokenEvent]):
    """Serves a workload while it is iterated over; yields the tokens of its own requests.

    A reader that stops early (`close`, or dropping it) aborts the requests that are still open, and
    so does an exception while it serves; events that it has by then can still be read. Requests of
    others are computed along the way, and their events kept for them.

    Args:
        engine: what serves it, and keeps account of its streams.
        workload: requests that can all be served.
        on_step: called after every step.

    Raises:
        RuntimeError: at its first token, if the engine is serving another stream then; it can be
            read when that has ended.
    """

    def __init__(
        self, engine: Engine, workload: Workload, on_step: Callable[[StepInfo], None] | None
    ) -> None:
        self.mailbox: Mailbox[TokenEvent] = Mailbox()
        self._engine = engine
        self.names = workload.names
        self._wishes: set[str] = set()
        self._steps = _serve(engine, workload, self.mailbox, on_step, self._wishes)

    @property
    def is_open(self) -> bool:
        """Whether it has begun and not ended."""
        state = inspect.getgeneratorstate(self._steps)
        return state in (inspect.GEN_RUNNING, inspect.GEN_SUSPENDED)

    @property
    def has_ended(self) -> bool:
        """Whether it was served to its end, closed, or ended by an exception."""
        return inspect.getgeneratorstate(self._steps) == inspect.GEN_CLOSED

    def __next__(self) -> TokenEvent:
        self.mailbox.arrived()
        while not len(self.mailbox):
            if not (self.is_open or self.has_ended):
                refuse_second(self._engine._streams)
            next(self._steps)
        try:
            return self.mailbox.hand_out_first()
        except BaseException:
            self.mailbox.came_back()
            raise

    def close(self) -> None:
        """Aborts what is open; after a step, if it is called during one."""
        if inspect.getgeneratorstate(self._steps) == inspect.GEN_RUNNING:
            self._wishes.add("close")
        else:
            self._steps.close()


def _serve(
    engine: Engine,
    workload: Workload,
    mailbox: Mailbox[TokenEvent],
    on_step: Callable[[StepInfo], None] | None,
    wishes: set[str],
) -> Generator[None, None, None]:
    arrivals = workload.arrivals
    times = [0.0] * len(workload.prompts) if arrivals is None else arrivals
    firsts = (at for at, (_, choice) in enumerate(workload.names) if not choice)
    queue = deque(sorted(firsts, key=times.__getitem__))
    others: dict[int, list[int]] = {}  # of a prompt, by the request that computes it for them
    limit = workload.concurrency or len(times)
    started = time.perf_counter()
    in_flight: set[int] = set()
    try:
        while (queue or in_flight or others) and "close" not in wishes:
            elapsed = time.perf_counter() - started
            for first in [each for each in others if _has_begun(engine, each)]:
                queue.extendleft(reversed(others.pop(first)))
            while queue and times[queue[0]] <= elapsed and len(in_flight) < limit:
                at = queue.popleft()
                request_id = engine._enter(
                    workload.prompts[at],
                    workload.sampling[at],
                    workload.salts[at],
                    None if arrivals is None else started + times[at],
                    mailbox,
                    *workload.names[at],
                )
                in_flight.add(request_id)
                if more := workload.others(at):
                    others[request_id] = more
            if not in_flight:
                time.sleep(times[queue[0]] - elapsed)
                continue
            if in_flight & engine.open_requests:
                engine._advance()
                if on_step is not None:
                    on_step(engine.info(time.perf_counter() - started))
            in_flight &= engine.open_requests
            yield
    finally:
        engine._abort(in_flight)


def _has_begun(engine: Engine, request_id: int) -> bool:
    """Whether the prompt of a request was computed, or it has ended."""
    sequence = engine._requests.get(request_id)
    return sequence is None or sequence.generated > 0


def refuse_second(known: Known) -> None:
    """Raises RuntimeError if one of an engine's streams is open."""
    if any((stream := ref()) is not None and stream.is_open for ref, _ in known):
        raise RuntimeError(
            "expected an idle engine, but it serves another stream: finish or close that first"
        )


def ended(known: Known) -> list[Mailbox[TokenEvent]]:
    """Mailboxes of streams that ended, whose requests nobody waits for any more."""
    return [box for ref, box in known if (stream := ref()) is None or stream.has_ended]


def results_of(stream: Stream, *, in_order: bool) -> Iterator[GenerationResult]:
    """The results among the events of a stream, as they come or in the order of the prompts."""
    with contextlib.closing(stream):
        finished = (event.result for event in stream if event.result is not None)
        yield from _in_order(finished, stream.names) if in_order else finished


def _in_order(
    results: Iterable[GenerationResult], names: Iterable[tuple[int, int]]
) -> Iterator[GenerationResult]:
    """Results in the order of their names, each as soon as those before it are there."""
    early: dict[tuple[int, int], GenerationResult] = {}
    waiting = deque(names)
    for result in results:
        early[result.index, result.choice] = result
        while waiting and waiting[0] in early:
            yield early.pop(waiting.popleft())
    yield from (early[name] for name in sorted(early))  # behind one that was aborted


def _all_token_ids(prompts: Any) -> list[list[int]]:
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
        raise ConfigError(
            f"expected a list of prompts, each a list of token ids, got {type(prompts).__name__}: "
            "tokenize first, and put a single prompt into a list"
        )
    return [token_ids(prompt) for prompt in prompts]


def _one_each(given: Any, one: type | tuple[type, ...], count: int, name: str) -> list[Any]:
    """A list of ``count``: what is given, or that many of the one that is given."""
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
