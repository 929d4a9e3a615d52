"""The tokens that serving a workload gives, one after the other."""

from __future__ import annotations

import contextlib
import inspect
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import NamedTuple

from compiled_attn.engine.metrics import StepInfo
from compiled_attn.engine.sequence import GenerationResult, Mailbox, TokenEvent
from compiled_attn.engine.workload import Workload

__all__ = ["Server", "Stream", "Streams", "results_of"]


class Server(NamedTuple):
    """What a stream needs of an engine.

    Args:
        enter: queues a request with the mailbox of its events and its index there; gives its id.
        advance: computes one step for everybody.
        abort: drops a request.
        info: the state, so many seconds after the start.
        open_requests: ids of the requests that wait or run.
        refuse_second: raises RuntimeError if a stream is open.
    """

    enter: Callable[..., int]
    advance: Callable[[], None]
    abort: Callable[[int], None]
    info: Callable[[float], StepInfo]
    open_requests: Callable[[], set[int]]
    refuse_second: Callable[[], None]


class Stream(Iterator[TokenEvent]):
    """Serves a workload while it is iterated over; yields the tokens of its own requests.

    A reader that stops early (`close`, or dropping it) aborts the requests that are still open, and
    so does an exception while it serves; events that it has by then can still be read. Requests of
    others are computed along the way, and their events kept for them.

    Args:
        server: the engine.
        workload: requests that can all be served.
        on_step: called after every step.

    Raises:
        RuntimeError: at its first token, if the engine is serving another stream then; it can be
            read when that has ended.
    """

    def __init__(
        self, server: Server, workload: Workload, on_step: Callable[[StepInfo], None] | None
    ) -> None:
        self.mailbox: Mailbox[TokenEvent] = Mailbox()
        self._server = server
        self._wishes: set[str] = set()
        self._steps = _serve(server, workload, self.mailbox, on_step, self._wishes)

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
                self._server.refuse_second()
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
    server: Server,
    workload: Workload,
    mailbox: Mailbox[TokenEvent],
    on_step: Callable[[StepInfo], None] | None,
    wishes: set[str],
) -> Generator[None, None, None]:
    arrivals = workload.arrivals
    times = [0.0] * len(workload.prompts) if arrivals is None else arrivals
    queue = deque(sorted(range(len(times)), key=times.__getitem__))
    limit = workload.concurrency or len(times)
    started = time.perf_counter()
    in_flight: set[int] = set()
    try:
        while (queue or in_flight) and "close" not in wishes:
            elapsed = time.perf_counter() - started
            while queue and times[queue[0]] <= elapsed and len(in_flight) < limit:
                at = queue.popleft()
                in_flight.add(
                    server.enter(
                        workload.prompts[at],
                        workload.sampling[at],
                        workload.salts[at],
                        None if arrivals is None else started + times[at],
                        mailbox,
                        at,
                    )
                )
            if not in_flight:
                time.sleep(times[queue[0]] - elapsed)
                continue
            if in_flight & server.open_requests():
                server.advance()
                if on_step is not None:
                    on_step(server.info(time.perf_counter() - started))
            in_flight &= server.open_requests()
            yield
    finally:
        for request_id in in_flight & server.open_requests():
            server.abort(request_id)


class Streams:
    """The streams of an engine: at most one is open, and none leaves requests behind."""

    def __init__(self) -> None:
        self._known: list[tuple[weakref.ref[Stream], Mailbox[TokenEvent]]] = []

    def add(self, stream: Stream) -> None:
        """Takes a stream that was made."""
        self._known = [*self._known, (weakref.ref(stream), stream.mailbox)]

    def refuse_second(self) -> None:
        """Raises RuntimeError if one is open."""
        streams = [ref() for ref, _ in self._known]
        if any(stream is not None and stream.is_open for stream in streams):
            raise RuntimeError(
                "expected an idle engine, but it serves another stream: finish or close that first"
            )

    def ended(self) -> list[Mailbox[TokenEvent]]:
        """Mailboxes of those that ended, whose requests nobody waits for any more."""
        return [box for ref, box in self._known if (s := ref()) is None or s.has_ended]

    def forget(self, ended: list[Mailbox[TokenEvent]]) -> None:
        """Takes out streams that ended."""
        self._known = [entry for entry in self._known if all(entry[1] is not b for b in ended)]

    def __len__(self) -> int:
        """How many streams are known."""
        return len(self._known)


def results_of(stream: Stream, *, in_order: bool) -> Iterator[GenerationResult]:
    """The results among the events of a stream, as they come or in the order of the prompts."""
    with contextlib.closing(stream):
        finished = (event.result for event in stream if event.result is not None)
        yield from _in_order(finished) if in_order else finished


def _in_order(results: Iterable[GenerationResult]) -> Iterator[GenerationResult]:
    """Results in the order of their prompts, each as soon as those before it are there."""
    early: dict[int, GenerationResult] = {}
    place = 0
    for result in results:
        early[result.index] = result
        while place in early:
            yield early.pop(place)
            place += 1
    yield from (early[index] for index in sorted(early))  # behind one that was aborted
