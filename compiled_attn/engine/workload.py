"""A set of requests and how they arrive, and the stream of tokens that serving them gives."""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from compiled_attn.blocks.prefix import Salt
from compiled_attn.engine.config import ConfigError
from compiled_attn.engine.mailbox import Mailbox
from compiled_attn.engine.metrics import StepInfo
from compiled_attn.engine.prompts import token_ids
from compiled_attn.engine.sampling import SamplingParams
from compiled_attn.engine.sequence import GenerationResult, TokenEvent

__all__ = ["Server", "Stream", "Workload", "in_order"]


_FOREVER = 1e9


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests with their sampling and arrival times.

    Args:
        prompts: token ids of each request.
        sampling: how each is continued.
        salts: which prompts may share blocks: those of equal salt.
        arrivals: seconds from the start at which each arrives (open loop); None: all at once.
        concurrency: requests in flight at most (closed loop); None: no limit.
    """

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
        concurrency: int | None,
    ) -> Workload:
        """The workload, with one sampling and one salt spread over all requests.

        Raises:
            ConfigError: prompts are not token ids, numbers of prompts, samplings, salts and
                arrivals differ, or concurrency < 1.
        """
        tokens = _all_token_ids(prompts)
        if sampling is None or isinstance(sampling, SamplingParams):
            sampling = [sampling or SamplingParams()] * len(tokens)
        salts = [salt] * len(tokens) if isinstance(salt, (str, bytes, type(None))) else salt
        for name, values in (
            ("SamplingParams", sampling),
            ("salts", salts),
            ("arrivals", arrivals),
        ):
            if values is not None and len(values) != len(tokens):
                raise ConfigError(
                    f"expected {len(tokens)} {name}, one per prompt, got {len(values)}"
                )
        if concurrency is not None and concurrency < 1:
            raise ConfigError(f"expected concurrency >= 1, got {concurrency}")
        if arrivals is not None and not all(0 <= at < _FOREVER for at in arrivals):
            raise ConfigError("expected arrivals of at least 0 seconds and below 31 years")
        return Workload(tokens, sampling, salts, arrivals, concurrency)


class Server(Protocol):
    """What a stream needs of an engine."""

    def enter(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        salt: Salt,
        *,
        arrived_s: float | None,
        mailbox: Mailbox[TokenEvent],
        index: int | None,
    ) -> int:
        """Queues a request whose events go to ``mailbox``; returns its id."""

    def advance(self) -> None:
        """Computes one step for everybody."""

    def abort(self, request_id: int) -> None:
        """Drops a request."""

    def info(self, elapsed_s: float) -> StepInfo:
        """The state now."""

    def refuse_second_stream(self) -> None:
        """Raises RuntimeError if another stream is being read."""

    @property
    def open_requests(self) -> set[int]:
        """Ids of the requests that wait or run."""


class Stream(Iterator[TokenEvent]):
    """Serves a workload while it is iterated over; yields the tokens of its own requests.

    A reader that stops early (`close`, or an exception) aborts the requests that are still open.
    Requests of others are computed along the way, and their events kept for them.

    Args:
        server: the engine.
        workload: requests that can all be served.
        on_step: called after every step.

    Raises:
        RuntimeError: the engine is serving another stream already.
    """

    def __init__(
        self, server: Server, workload: Workload, on_step: Callable[[StepInfo], None] | None
    ) -> None:
        self.mailbox: Mailbox[TokenEvent] = Mailbox()
        self._events = _serve(server, workload, self.mailbox, on_step)

    @property
    def is_open(self) -> bool:
        """Whether it has begun and not ended."""
        state = inspect.getgeneratorstate(self._events)
        return state in (inspect.GEN_RUNNING, inspect.GEN_SUSPENDED)

    @property
    def has_ended(self) -> bool:
        """Whether it was read to its end, closed, or ended by an exception."""
        return inspect.getgeneratorstate(self._events) == inspect.GEN_CLOSED

    def __next__(self) -> TokenEvent:
        return next(self._events)

    def close(self) -> None:
        """Aborts what is open; yields nothing more."""
        self._events.close()


def _serve(
    server: Server,
    workload: Workload,
    mailbox: Mailbox[TokenEvent],
    on_step: Callable[[StepInfo], None] | None,
) -> Generator[TokenEvent, None, None]:
    server.refuse_second_stream()
    arrivals = workload.arrivals
    times = [0.0] * len(workload.prompts) if arrivals is None else arrivals
    queue = deque(sorted(range(len(times)), key=times.__getitem__))
    limit = workload.concurrency or len(times)
    started = time.perf_counter()
    in_flight: set[int] = set()
    try:
        while queue or in_flight:
            elapsed = time.perf_counter() - started
            while queue and times[queue[0]] <= elapsed and len(in_flight) < limit:
                at = queue.popleft()
                in_flight.add(
                    server.enter(
                        workload.prompts[at],
                        workload.sampling[at],
                        workload.salts[at],
                        arrived_s=None if arrivals is None else started + times[at],
                        mailbox=mailbox,
                        index=at,
                    )
                )
            if not in_flight:
                time.sleep(times[queue[0]] - elapsed)
                continue
            if in_flight & server.open_requests:
                server.advance()
                if on_step is not None:
                    on_step(server.info(time.perf_counter() - started))
            in_flight &= server.open_requests
            yield from mailbox.hand_out()
            mailbox.arrived()
    finally:
        for request_id in in_flight & server.open_requests:
            server.abort(request_id)


def in_order(results: Iterable[GenerationResult]) -> Iterator[GenerationResult]:
    """Results in the order of their prompts, each as soon as those before it are there."""
    early: dict[int, GenerationResult] = {}
    place = 0
    for result in results:
        early[result.index] = result
        while place in early:
            yield early.pop(place)
            place += 1
    yield from (early[index] for index in sorted(early))  # behind one that was aborted


def _all_token_ids(prompts: Any) -> list[list[int]]:
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
        raise ConfigError(
            f"expected a list of prompts, each a list of token ids, got {type(prompts).__name__}: "
            "tokenize first, and put a single prompt into a list"
        )
    return [token_ids(prompt) for prompt in prompts]
