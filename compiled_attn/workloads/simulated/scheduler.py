"""The simulated scheduler: the requests that wait, run and decode, and the blocks they hold.

Decodes advance all at once: a request that decodes has computed one token more for each decode step
since it began, and its state is touched again only where it begins a block or ends.
"""

from __future__ import annotations

from collections import deque
from typing import ClassVar, TypeAlias

from compiled_attn.workloads.simulated.engine import SimulatedEngine
from compiled_attn.workloads.simulated.pool import SimulatedPool
from compiled_attn.workloads.simulated.requests import SimulatedRequest

__all__ = ["SimulatedScheduler"]

Need: TypeAlias = tuple[int, ...]


class SimulatedScheduler:
    """The engine's state; subclasses say what a step is."""

    axes: ClassVar[dict[str, tuple[str, ...]]]

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine, self.size = engine, engine.block_size
        self.pool = SimulatedPool(engine.blocks)
        self.needs: dict[str, list[Need]] = {name: [] for name in self.axes}
        self.waiting: deque[SimulatedRequest] = deque()
        self.running: dict[SimulatedRequest, int] = {}  # in order of admission, with its number
        self.prefilling: dict[SimulatedRequest, None] = {}
        self.decoding = 0
        self.decodes = 0
        self.admitted = 0
        self.finished = 0
        self.preemptions = 0
        self.seconds = 0.0
        self.crossing: list[dict[SimulatedRequest, None]] = [{} for _ in range(self.size)]
        self.finishing: dict[int, list[tuple[SimulatedRequest, int]]] = {}

    def serve(self, queue: deque[tuple[float, SimulatedRequest]], limit: int) -> None:
        """Run until every request has finished."""
        now, offered, total = 0.0, 0, len(queue)
        while self.finished < total:
            while queue and queue[0][0] <= now and offered - self.finished < limit:
                self.waiting.append(queue.popleft()[1])
                offered += 1
            if offered == self.finished:
                now = queue[0][0]
                continue
            seconds = self.step()
            now += seconds
            self.seconds += seconds

    def step(self) -> float:
        """Schedule and compute one step; returns its seconds."""
        raise NotImplementedError

    def admit(self, room: int) -> int:
        """Start the first waiting request; returns the tokens it computes now, 0 if it cannot."""
        if not self.waiting or len(self.running) >= self.engine.max_seqs or room < 1:
            return 0
        request = self.waiting[0]
        keys = (request.key(at) for at in range((request.known - 1) // self.size))
        hits = self.pool.find(keys)
        needed = -(-request.known // self.size) + len(self.running) - len(hits)
        if needed > self.pool.available - self.pool.idle(hits):
            return 0
        self.waiting.popleft()
        self.pool.hold(hits)
        request.blocks, request.keyed = hits, len(hits)
        request.computed = len(hits) * self.size
        count = min(request.known - request.computed, room)
        self.grow(request, request.computed + count)
        self.running[request] = self.admitted
        self.admitted += 1
        self.prefilling[request] = None
        return count

    def grow(self, request: SimulatedRequest, length: int) -> None:
        """Give a request the blocks of its first ``length`` tokens."""
        missing = -(-length // self.size) - len(request.blocks)
        request.blocks += [self.pool.take() for _ in range(missing)]

    def make_room(self, request: SimulatedRequest, missing: int) -> bool:
        """Preempt the newest until ``missing`` blocks are there; False if it was the request."""
        while self.pool.available < missing:
            victim = next(reversed(self.running))
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def preempt(self, request: SimulatedRequest) -> None:
        """Take a running request's blocks; it will be computed again."""
        self.leave(request)
        self.preemptions += 1
        request.computed = 0
        self.waiting.appendleft(request)

    def leave(self, request: SimulatedRequest) -> None:
        """Take a request out of the running ones."""
        if request.since is not None:
            self.pool.unread(request.blocks)
            done = self.decodes - request.since
            del self.crossing[(request.since - request.computed) % self.size][request]
            request.computed += done
            request.known += done
            request.left -= done
            request.since = None
            self.decoding -= 1
        self.commit(request)
        self.pool.drop(request.blocks)
        request.blocks, request.keyed = [], 0
        request.stamp += 1
        del self.running[request]
        self.prefilling.pop(request, None)

    def commit(self, request: SimulatedRequest) -> None:
        """Full blocks can be found from now on."""
        full = request.computed // self.size
        for number in range(request.keyed, full):
            self.pool.know(request.blocks[number], request.key(number))
        request.keyed = max(request.keyed, full)

    def decode(self, request: SimulatedRequest) -> None:
        """From here on the request computes one token in every decode step."""
        del self.prefilling[request]
        request.since = self.decodes
        self.decoding += 1
        self.pool.read(request.blocks)
        self.crossing[(request.since - request.computed) % self.size][request] = None
        last = self.decodes + request.left
        self.finishing.setdefault(last, []).append((request, request.stamp))

    def begin_blocks(self) -> bool:
        """Decodes whose last block is full get a new one; False if that preempted any."""
        crossing = self.crossing[self.decodes % self.size]
        if not crossing:
            return True
        before = len(self.running)
        in_order = sorted(crossing, key=self.running.__getitem__)
        for request in in_order:
            if request not in self.running or not self.make_room(request, 1):
                continue
            computed = request.computed + self.decodes - (request.since or 0)
            for number in range(request.keyed, computed // self.size):
                self.pool.know(request.blocks[number], request.key(number))
                request.keyed += 1
            block = self.pool.take()
            request.blocks.append(block)
            self.pool.read((block,))
        return len(self.running) == before

    def advance(self) -> None:
        """Every decode has computed its token; some were the last."""
        self.decodes += 1
        last = [r for r, stamp in self.finishing.pop(self.decodes, ()) if r.stamp == stamp]
        for request in sorted(last, key=self.running.__getitem__):
            self.leave(request)
            self.finished += 1

    def after_chunk(self, request: SimulatedRequest) -> None:
        """A chunk is computed: the request goes on with prompt, decodes or ends."""
        if request.computed == request.known:  # its next token is sampled
            request.known += 1
            request.left -= 1
            if not request.left:
                self.leave(request)
                self.finished += 1
                return
        if request.known - request.computed == 1:
            self.decode(request)
