"""An executor that counts instead of computing, for tests of what an engine does around it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from compiled_attn.engine import EngineConfig
from compiled_attn.engine.executor import ExecutorReport, FittedStep
from compiled_attn.engine.sizing import Sizing
from compiled_attn.step import BatchBuilder, StepLimits, Tables
from graphs import WarmupReport

CONFIG = EngineConfig(16, 4, block_size=4, num_blocks=20, context=40, defrag_waste=None)


class Counting:
    """The next token is the last one plus one; 99 is the end of a text. It remembers slots."""

    config = CONFIG

    def __init__(self) -> None:
        form = Tables(20, 4, width=10)
        buckets = form.ladder(StepLimits(16, 4, 10, 19), 8).with_cost(sum_of_sizes)
        self.sizing = Sizing(40, 200, 4, 20, form, buckets)
        self.eos = frozenset([99])
        self.copies = SimpleNamespace(num_blocks=20, bytes_per_block=1, move=self._move)
        self.seen: dict[int, int] = {}
        self._builder = BatchBuilder(20, 4)

    def attach(self):
        pass

    def warmup(self, progress=None):
        return WarmupReport((), 0.0)

    def check_unchanged(self):
        pass

    def fit(self, step, table):
        rows = self._builder.rows(
            table,
            [table.row(part.sequence.request_id) for part in step],
            [part.sequence.computed for part in step],
            [part.count for part in step],
            [token for part in step for token in part.tokens],
        )
        plan = self.sizing.form.plan(rows)
        return FittedStep(step, plan, self.sizing.buckets.pick(**plan.need), plan.need)

    def run(self, step):
        batch = step.plan.fill(step.bucket)
        self.seen |= dict(zip(batch.slot_mapping.tolist(), batch.input_ids.tolist(), strict=True))
        for part, table, length in zip(
            step.parts, batch.block_tables.numpy(), batch.seq_lens.tolist(), strict=False
        ):
            slots = (table[:, None] * 4 + np.arange(4)).reshape(-1)[:length]
            sequence = part.sequence
            assert [self.seen[slot] for slot in slots] == sequence.tokens[:length]
        return [part.tokens[-1] + 1 for part in step.parts]

    def _move(self, pairs):
        for source, target in np.asarray(pairs).tolist():
            for at in range(4):
                if (token := self.seen.get(4 * source + at)) is not None:
                    self.seen[4 * target + at] = token

    def finite_blocks(self, places):
        return len(places)

    def report(self):
        return ExecutorReport("none", "counting")


def sum_of_sizes(bucket):
    return float(sum(bucket.sizes))
