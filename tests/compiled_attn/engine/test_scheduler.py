"""The scheduler: budgets, chunks, admission, preemption; checked on a pool, without a model."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_attn.blocks import BlockPool
from compiled_attn.engine import SamplingParams, Scheduler, Sequence


def _sequence(index: int, prompt: int, new: int = 4, start: int = 0) -> Sequence:
    tokens = list(range(start, start + prompt))
    return Sequence(index, tokens, prompt, SamplingParams(max_new_tokens=new), 0.0)


def _run_step(scheduler: Scheduler) -> list[tuple[int, int]]:
    """One step with token 1 sampled everywhere: (index, count) of each part."""
    step = scheduler.schedule()
    shape = [(part.sequence.index, part.count) for part in step]
    sampled = [part.sequence for part in step if part.wants_logits]
    scheduler.commit(step)
    for sequence in sampled:
        sequence.append(1, 0.0)
        if sequence.finish_reason:
            scheduler.finish(sequence)
    return shape


def test_a_long_prompt_is_cut_into_chunks_of_the_budget():
    scheduler = Scheduler(BlockPool(64, 4), max_tokens=10, max_seqs=4)
    scheduler.add(_sequence(0, 25, new=2))
    assert [_run_step(scheduler) for _ in range(4)] == [[(0, 10)], [(0, 10)], [(0, 5)], [(0, 1)]]
    assert not scheduler.has_work


def test_decodes_come_first_and_prompts_fill_the_rest():
    scheduler = Scheduler(BlockPool(64, 4), max_tokens=8, max_seqs=4)
    scheduler.add(_sequence(0, 4))
    scheduler.add(_sequence(1, 12, start=100))
    assert _run_step(scheduler) == [(0, 4), (1, 4)]
    assert _run_step(scheduler) == [(0, 1), (1, 7)]
    assert _run_step(scheduler) == [(0, 1), (1, 1)]


def test_no_more_than_max_seqs_run():
    scheduler = Scheduler(BlockPool(64, 4), max_tokens=64, max_seqs=2)
    for index in range(3):
        scheduler.add(_sequence(index, 3, start=100 * index))
    assert _run_step(scheduler) == [(0, 3), (1, 3)]
    assert len(scheduler.waiting) == 1


def test_a_common_prefix_is_computed_once():
    scheduler = Scheduler(BlockPool(64, 4), max_tokens=64, max_seqs=4)
    scheduler.add(_sequence(0, 10))
    assert _run_step(scheduler) == [(0, 10)]
    scheduler.add(_sequence(1, 10))
    assert _run_step(scheduler) == [(0, 1), (1, 2)]


def test_when_blocks_run_out_the_newest_sequence_is_computed_again_later():
    scheduler = Scheduler(BlockPool(8, 2), max_tokens=16, max_seqs=4)
    scheduler.add(_sequence(0, 5, new=6))
    scheduler.add(_sequence(1, 4, new=6, start=100))
    preempted = False
    while scheduler.has_work:
        _run_step(scheduler)
        preempted |= bool(scheduler.waiting) and scheduler.waiting[0].computed == 0
    assert scheduler.preemptions > 0 and preempted
    assert scheduler.pool.stats().used == 0


@given(
    requests=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(0, 2)),
        min_size=1,
        max_size=12,
    ),
    budget=st.integers(4, 40),
    num_blocks=st.integers(12, 40),
)
@settings(deadline=None, max_examples=150)
def test_every_request_finishes_with_all_its_tokens_and_no_block_leaks(
    requests, budget, num_blocks
):
    pool = BlockPool(num_blocks, 4)
    scheduler = Scheduler(pool, max_tokens=budget, max_seqs=4)
    sequences = [
        _sequence(i, prompt, new, start=100 * start)
        for i, (prompt, new, start) in enumerate(requests)
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    for _ in range(5000):
        if not scheduler.has_work:
            break
        shape = _run_step(scheduler)
        assert shape and sum(count for _, count in shape) <= budget
        assert len({index for index, _ in shape}) == len(shape) <= 4
    assert not scheduler.has_work
    for sequence, (prompt, new, _) in zip(sequences, requests, strict=True):
        assert len(sequence.tokens) == prompt + new
    assert pool.stats().used == 0 and pool.requests == []
