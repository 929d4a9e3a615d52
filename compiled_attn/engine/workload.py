"""A set of requests and how they arrive, and the loop that serves them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compiled_attn.engine.config import ConfigError
from compiled_attn.engine.metrics import StepInfo
from compiled_attn.engine.sampling import SamplingParams
from compiled_attn.engine.sequence import TokenEvent

if TYPE_CHECKING:
    from compiled_attn.engine.engine import Engine

__all__ = ["Workload", "serve"]


_FOREVER = 1e9


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests with their sampling and arrival times.

    Args:
        prompts: token ids of each request.
        sampling: how each is continued.
        arrivals: seconds from the start at which each arrives (open loop); None: all at once.
        concurrency: requests in flight at most (closed loop); None: no limit.
    """

    prompts: Sequence[Sequence[int]]
    sampling: Sequence[SamplingParams]
    arrivals: Sequence[float] | None
    concurrency: int | None

    @staticmethod
    def of(
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        arrivals: Sequence[float] | None,
        concurrency: int | None,
    ) -> Workload:
        """The workload, with one sampling spread over all requests.

        Raises:
            ConfigError: numbers of prompts, samplings and arrivals differ, or concurrency < 1.
        """
        if sampling is None or isinstance(sampling, SamplingParams):
            sampling = [sampling or SamplingParams()] * len(prompts)
        for name, values in (("SamplingParams", sampling), ("arrivals", arrivals)):
            if values is not None and len(values) != len(prompts):
                raise ConfigError(
                    f"expected {len(prompts)} {name}, one per prompt, got {len(values)}"
                )
        if concurrency is not None and concurrency < 1:
            raise ConfigError(f"expected concurrency >= 1, got {concurrency}")
        if arrivals is not None and not all(0 <= at < _FOREVER for at in arrivals):
            raise ConfigError("expected arrivals of at least 0 seconds and below 31 years")
        tokens = [[int(token) for token in prompt] for prompt in prompts]
        return Workload(tokens, sampling, arrivals, concurrency)


def serve(
    engine: Engine, workload: Workload, on_step: Callable[[StepInfo], None] | None = None
) -> Generator[TokenEvent, None, None]:
    """Submits requests as they arrive and steps the engine until all are finished.

    A consumer that stops early aborts the requests that are still open. Requests that others
    submitted to the engine are computed along the way; their tokens are not yielded here.

    Raises:
        RuntimeError: the engine is serving another workload already.
    """
    with engine.serving():
        yield from _serve(engine, workload, on_step)


def _serve(
    engine: Engine, workload: Workload, on_step: Callable[[StepInfo], None] | None
) -> Generator[TokenEvent, None, None]:
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
                arrived = None if workload.arrivals is None else started + times[at]
                in_flight.add(
                    engine.submit(workload.prompts[at], workload.sampling[at], arrived_s=arrived)
                )
            if not in_flight:
                time.sleep(times[queue[0]] - elapsed)
                continue
            events = [event for event in engine.step() if event.index in in_flight]
            in_flight &= engine.open_requests
            if on_step is not None:
                on_step(engine.info(time.perf_counter() - started))
            yield from events
    finally:
        for index in in_flight & engine.open_requests:
            engine.abort(index)
