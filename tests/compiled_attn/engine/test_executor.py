"""An engine serves with whatever executor it is given: here one that counts, without a model."""

from __future__ import annotations

import numpy as np
import pytest

from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.engine.executor import ExecutorReport, FittedStep
from compiled_attn.engine.local import LocalExecutor
from compiled_attn.engine.sizing import Sizing
from compiled_attn.step import BatchBuilder, StepLimits, Tables
from graphs import WarmupReport
from tests.compiled_attn.tiny import plain_generate, tiny_model

CONFIG = EngineConfig(16, 4, block_size=4, num_blocks=20, context=40, defrag_waste=None)


class Counting:
    """The next token is the last one plus one; 99 is the end of a text. It remembers slots."""

    def __init__(self) -> None:
        form = Tables(20, 4, width=10)
        buckets = form.ladder(StepLimits(16, 4, 10, 19), 8).with_cost(sum_of_sizes)
        self.sizing = Sizing(40, 200, 4, 20, form, buckets)
        self.eos = frozenset([99])
        self.copies = None
        self.seen: dict[int, int] = {}
        self._builder = BatchBuilder(20, 4)

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

    def finite_blocks(self, places):
        return len(places)

    def report(self):
        return ExecutorReport("none", "counting")


def sum_of_sizes(bucket):
    return float(sum(bucket.sizes))


@pytest.fixture
def engine() -> Engine:
    made = Engine(Counting(), CONFIG)
    made.warmup()
    return made


def test_every_request_is_continued_and_every_token_found_where_its_tables_say(engine):
    prompts = [[n, 5, n] * (1 + n % 4) for n in range(1, 30)]
    results = engine.generate(prompts, SamplingParams(max_new_tokens=20), in_order=True)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.tokens == list(range(prompt[-1] + 1, prompt[-1] + 21))
    report = engine.report()
    assert (report.kernel, report.backend, report.requests) == ("counting", "none", 29)
    assert report.preemptions > 0 and report.prefix_hit_ratio > 0


def test_the_executor_says_what_ends_a_text(engine):
    (result,) = engine.generate([[96]], SamplingParams(max_new_tokens=20))
    assert (result.tokens, result.finish_reason) == ([97, 98, 99], "stop")


def test_a_model_is_the_short_form_of_a_local_executor():
    model = tiny_model()
    config = EngineConfig(16, 4, block_size=4, num_blocks=20, backend="eager", max_graphs=3)
    engine = Engine(LocalExecutor(model, config), config)
    engine.warmup()
    (result,) = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=5))
    assert result.tokens == plain_generate(model, [1, 2, 3], 5)
