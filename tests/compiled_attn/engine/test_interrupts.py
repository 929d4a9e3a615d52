"""A step happens or does not: exceptions at every line of it, in runs where everything happens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import pytest
import torch

from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from tests.compiled_attn.tiny import plain_generate, tiny_model
from tests.interrupts import Interruption, count_lines, interrupted_at
from tests.stand_in import counts, open_device

NEW = 7


class Boom(BaseException):
    """No `except Exception` catches it, like KeyboardInterrupt."""


class AtLine(Interruption):
    """Raises at the first event of one line, and notes all lines that it saw."""

    def __init__(self, target: str = "") -> None:
        super().__init__(-1, Boom)
        self.target = target
        self.seen: set[str] = set()

    def _traced(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and not self.was_raised:
            where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            self.seen.add(where)
            if where == self.target:
                self._at = self.lines
        return super()._traced(frame, event, arg)


def _prompts() -> list[list[int]]:
    """Prompts that share blocks, and the beginning of blocks."""
    rng = random.Random(5)
    common = [rng.randrange(1, 128) for _ in range(11)]
    tails = [[rng.randrange(1, 128) for _ in range(rng.randrange(1, 9))] for _ in range(6)]
    return [common[: rng.randrange(6, 12)] + tail for tail in tails] + [tails[0], common]


@dataclass
class Run:
    """An engine that serves the same prompts for ever, and what came of them."""

    kernel: str = "portable"
    device: str = "cpu"
    interrupts: int = 0
    places: set[str] = field(default_factory=set)
    told: dict[int, list[int]] = field(default_factory=dict)
    finished: int = 0

    def __post_init__(self) -> None:
        model, self.prompts = tiny_model(), _prompts()
        self.wanted = [plain_generate(model, prompt, NEW) for prompt in self.prompts]
        config = EngineConfig(
            max_tokens_per_step=48,
            max_seqs=4,
            block_size=4,
            num_blocks=20,
            backend="eager",
            max_graphs=3,
            defrag_waste=0.0,
            kernel=self.kernel,
        )
        self.engine = Engine(model.to(self.device), config)
        self.engine.warmup()
        self.of: dict[int, int] = {}
        self.next = 0

    def step(self, interruption: Interruption | None = None) -> None:
        """Keeps the engine busy by one step, interrupted if asked to."""
        while len(self.engine.open_requests) < 6:
            which = self.next % len(self.prompts)
            params = SamplingParams(max_new_tokens=NEW)
            self.of[self.engine.submit(self.prompts[which], params)] = which
            self.next += 1
        if interruption is None:
            self.take(self.engine.step())
            return
        try:
            with interruption:
                events = self.engine.step()
        except Boom:
            self.note(interruption)
        else:
            self.take(events)

    def note(self, interruption: Interruption) -> None:
        assert interruption.was_raised
        self.interrupts += 1
        self.places.add(interruption.where)
        handler = torch._dynamo.callback.callback_handler
        assert not handler.start_callbacks and not handler.end_callbacks, interruption.where

    def take(self, events) -> None:
        for event in events:
            self.told.setdefault(event.request_id, []).append(event.token)
            if event.result is not None:
                wanted = self.wanted[self.of.pop(event.request_id)]
                assert event.result.tokens == wanted == self.told.pop(event.request_id)
                self.finished += 1

    def drain(self) -> None:
        """Serves what is left; nothing is lost, nothing leaks."""
        for _ in range(300):
            if not self.engine.has_work:
                break
            self.take(self.engine.step())
        assert not self.of and not self.told
        assert self.engine.pool.stats().used == 0 and not self.engine.pool.requests
        report = self.engine.report()
        assert report.requests == self.finished == self.next
        assert report.generated_tokens == NEW * self.finished
        assert self.interrupts / 3 < report.restarts <= self.interrupts
        assert report.failed_requests == 0
        # What the run is to have in it.
        assert report.preemptions and report.prefix_hit_ratio
        assert report.memory["defrag_moves"]
        assert report.memory["defrag_swaps"]


def _random_lines(rng: random.Random) -> Iterator[Callable[[], Interruption]]:
    while True:
        yield lambda: interrupted_at(int(2 ** rng.uniform(0, 11.5)), Boom)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kernel", "device", "interrupts"),
    [
        ("portable", "cpu", 60),
        ("auto", "stand_in", 60),
        pytest.param("portable", "cpu", 2500, marks=pytest.mark.slow),
        pytest.param("auto", "cpu", 1000, marks=pytest.mark.slow),
        pytest.param("auto", "stand_in", 1000, marks=pytest.mark.slow),
    ],
)
def test_steps_interrupted_at_random_lines_lose_no_token_and_no_block(kernel, device, interrupts):
    torn = 0
    if is_ahead := device != "cpu":
        open_device()
        torn = counts().torn  # so far, by other tests
    run, rng = Run(kernel, device), random.Random(interrupts)
    lines = _random_lines(rng)
    while run.interrupts < interrupts:
        for _ in range(rng.randrange(2, 8)):
            run.step()
        run.step(next(lines)())
    run.drain()
    assert bool(run.engine.report().steps_ahead) == is_ahead
    assert not is_ahead or counts().torn == torn


def _lines_of_steps(run: Run, steps: int) -> list[str]:
    seen = AtLine()
    for _ in range(steps):
        with seen:
            run.step()
    return sorted(place for place in seen.seen if "/tests/" not in place)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_step_interrupted_at_each_of_its_lines_loses_no_token_and_no_block():
    run = Run()
    for place in _lines_of_steps(run, 80):
        for _ in range(4):
            run.step()
        cut = AtLine(place)
        for _ in range(60):  # until a step comes to this line
            run.step(cut)
            if cut.was_raised:
                break
    run.drain()
    assert len(run.places) > 400


def _busy_engine(kernel: str = "auto") -> Engine:
    sizes = {"max_tokens_per_step": 24, "max_seqs": 3, "block_size": 4, "num_blocks": 40}
    engine = Engine(
        tiny_model(), EngineConfig(**sizes, max_graphs=2, backend="eager", kernel=kernel)
    )
    engine.warmup()
    return engine


def test_a_submit_that_is_interrupted_leaves_no_request():
    engine, prompt = _busy_engine(), [1, 2, 3]
    first = engine.submit(prompt)
    lines = count_lines(lambda: engine.submit([4, 5, 6]))
    assert lines > 20
    before = engine.open_requests
    for line in range(lines):
        with pytest.raises(Boom), interrupted_at(line, Boom):
            engine.submit([7, 8, 9])
        assert engine.open_requests == before
        assert {s.request_id for s in engine.scheduler.waiting} == before
    while engine.has_work:
        told = [event.request_id for event in engine.step()]
        assert set(told) <= before and first in before


def test_an_abort_that_is_interrupted_was_done_or_not_and_hurts_nobody():
    engine, prompts = _busy_engine(), _prompts()
    params = SamplingParams(max_new_tokens=100)
    kept = engine.submit(prompts[0], SamplingParams(max_new_tokens=NEW))
    told, line, was_raised = [], 0, True
    while was_raised:
        victim = engine.submit(prompts[1], params)
        told += engine.step() + engine.step()
        cut = interrupted_at(line, Boom)
        try:
            with cut:
                engine.abort(victim)
        except Boom:
            if victim in engine.open_requests:
                engine.abort(victim)
        was_raised, line = cut.was_raised, line + 1
        assert not engine.open_requests - {kept}
        if kept not in engine.open_requests:
            kept = engine.submit(prompts[0], SamplingParams(max_new_tokens=NEW))
    while engine.has_work:
        told += engine.step()
    assert line > 30 and engine.pool.stats().used == 0
    wanted = plain_generate(engine.executor.module.model, prompts[0], NEW)
    results = [event.result for event in told if event.result is not None]
    assert len(results) > 3 and all(result.tokens == wanted for result in results)


def test_a_stream_that_is_interrupted_leaves_the_engine_ready_for_the_next():
    engine, prompts = _busy_engine(), _prompts()
    params = SamplingParams(max_new_tokens=NEW)
    by_hand = engine.submit(prompts[0], params)
    for line in (0, 3, 30, 300, 1000, 2000, 4000, 6000):
        with pytest.raises(Boom), interrupted_at(line, Boom):
            list(engine.stream(prompts[1:4], params))
        assert engine.open_requests <= {by_hand}
    told = []
    while engine.has_work:
        told += engine.step()
    wanted = [plain_generate(engine.executor.module.model, prompt, NEW) for prompt in prompts]
    assert [event.token for event in told] == wanted[0]
    for result in engine.generate(prompts, params):
        assert result.tokens == wanted[result.index]
    assert engine.pool.stats().used == 0
