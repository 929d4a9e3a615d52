"""Executors that count instead of computing, for tests of what an engine does around them."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace

import numpy as np

from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.engine.executor import ExecutorReport, PlannedStep
from compiled_attn.engine.logprobs import RowResult
from compiled_attn.engine.request_state import RequestState
from compiled_attn.engine.sizing import Sizing
from compiled_attn.engine.staging import Later
from compiled_attn.step import BatchBuilder, StepLimits, TableLayout
from graphs import WarmupReport

CONFIG = EngineConfig(16, 4, block_size=4, num_blocks=20, context=40, defrag_waste=1)
LONG = SamplingParams(max_new_tokens=30)
SECONDS = 20.0  # that nothing here takes, but a machine under load may


class Counting:
    """The next token is the last one plus one; 99 is the end of a text. It remembers slots."""

    config = CONFIG
    schedules_ahead = False
    window: int | None = None

    def __init__(self) -> None:
        layout = TableLayout(20, 4, width=10)
        buckets = layout.ladder(StepLimits(16, 4, 10, 19), 8).with_cost(sum_of_sizes)
        self.sizing = Sizing(40, 200, 4, 20, layout, buckets, window=self.window)
        self.eos = frozenset([99])
        self.copies = SimpleNamespace(num_blocks=20, bytes_per_block=1, move=self.move)
        self.seen: dict[int, int] = {}
        self._builder = BatchBuilder(20, 4, self.window)

    def attach(self):
        pass

    def warmup(self, progress=None):
        return WarmupReport((), 0.0)

    def check_unchanged(self):
        pass

    def plan(self, step, table):
        rows = self._builder.rows(
            table,
            [table.row(part.sequence.request_id) for part in step],
            step.starts,
            step.counts,
            [token for part in step for token in part.tokens],
        )
        plan = self.sizing.layout.plan(rows)
        return PlannedStep(step, plan, self.sizing.buckets.pick(**plan.need), plan.need)

    def launch(self, step):
        self.check(step, [list(part.tokens) for part in step.parts])
        return [RowResult(part.tokens[-1] + 1) for part in step.parts]

    def move(self, pairs):
        for source, target in np.asarray(pairs).tolist():
            for slot in range(4):
                if (token := self.seen.get(source * 4 + slot)) is not None:
                    self.seen[target * 4 + slot] = token

    def check(self, step, tokens):
        """Writes the tokens of each part to its slots; checks that all it sees are there."""
        batch = step.plan.fill(step.bucket)
        flat = [token for each in tokens for token in each]
        self.seen |= dict(zip(batch.slot_mapping.tolist(), flat, strict=False))
        for part, own, table, length in zip(
            step.parts, tokens, batch.block_tables.numpy(), batch.seq_lens.tolist(), strict=False
        ):
            slots = (table[:, None] * 4 + np.arange(4)).reshape(-1)[:length]
            expected = part.sequence.tokens[: part.start] + own
            first = 0 if self.window is None else max(0, part.start - self.window + 1)
            assert [self.seen[slot] for slot in slots[first:]] == expected[first:]
            assert len(expected) == length

    def report(self):
        return ExecutorReport("none", "counting")


class CountingAhead(Counting):
    """Returns the tokens of a step when they are read, and continues from its own until then."""

    schedules_ahead = True

    def __init__(self) -> None:
        super().__init__()
        self.tokens_of: dict[RequestState, int] = {}
        self.unread = self.most_unread = 0

    def launch(self, step):
        tokens = [
            [self.tokens_of[part.sequence]]
            if part.start == len(part.sequence.tokens)
            else list(part.tokens)
            for part in step.parts
        ]
        self.check(step, tokens)
        rows = [each[-1] + 1 for each in tokens]
        self.tokens_of = dict(zip(step.parts.sequences, rows, strict=True))
        self.unread += 1
        self.most_unread = max(self.most_unread, self.unread)
        return Later(partial(self._read, rows))

    def _read(self, rows):
        self.unread -= 1
        return [RowResult(token) for token in rows]


def sum_of_sizes(bucket):
    return float(sum(bucket.sizes))


class Paced(Counting):
    """Takes a step when the test lets it; fails in the step that the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = threading.Semaphore(0)
        self.begun = threading.Event()
        self.error: BaseException | None = None

    def launch(self, step):
        self.begun.set()
        assert self.steps.acquire(timeout=SECONDS)
        if self.error is not None:
            raise self.error
        return super().launch(step)


def warm_engine(executor=None) -> Engine:
    engine = Engine(executor or Counting(), CONFIG)
    engine.warmup()
    return engine


def used(engine: Engine) -> int:
    """Blocks that requests hold."""
    return engine.sizing.num_blocks - 1 - engine.pool.available
