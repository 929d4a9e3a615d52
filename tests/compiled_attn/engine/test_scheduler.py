"""The scheduler: budgets, chunks, admission, preemption; checked on a pool, without a model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from compiled_attn.cache.blocks import BlockPool
from compiled_attn.engine import RequestState, SamplingParams, Scheduler, Status
from compiled_attn.engine.logprobs import RowResult
from compiled_attn.engine.scheduler import ScheduledStep


def _sequence(
    request_id: int, prompt: int, new: int = 4, start: int = 0, *, scored: bool = False
) -> RequestState:
    """One whose prompt, if it is scored, needs a row of logits for each token."""
    tokens = list(range(start, start + prompt))
    params = SamplingParams(max_new_tokens=new, prompt_logprobs=0 if scored else None)
    return RequestState(request_id, tokens, prompt, params, 0.0)


def _run_step(scheduler: Scheduler) -> list[tuple[int, int]]:
    """One step with token 1 sampled everywhere: (id, count) of each part."""
    step = scheduler.schedule()
    shape = [(part.sequence.request_id, part.count) for part in step]
    sampled = [part.sequence for part in step if part.needs_logits]
    scheduler.commit(step)
    for sequence in sampled:
        reason = sequence.finish_reason(1)
        row = RowResult(1)
        event = sequence.event(row, 0, 0.0, reason)
        sequence.apply(row, 0, len(sequence.tokens), 0.0, event)
        if reason:
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


def test_decodes_alone_schedule_ahead_with_one_block_each_to_spare():
    scheduler = Scheduler(BlockPool(6, 4), max_tokens=64, max_seqs=2)
    scheduler.add(_sequence(0, 4))
    scheduler.add(_sequence(1, 4, start=100))
    assert not scheduler.can_schedule_ahead  # two prompts wait
    assert _run_step(scheduler) == [(0, 4), (1, 4)]
    assert scheduler.pool.available == 3 and scheduler.can_schedule_ahead
    scheduler.add(_sequence(2, 4, start=200))
    assert not scheduler.can_schedule_ahead


def test_a_launched_step_finishes_the_requests_that_surely_get_their_last_token():
    scheduler = Scheduler(BlockPool(64, 4), max_tokens=9, max_seqs=4)
    for request_id, (prompt, new) in enumerate([(2, 1), (2, 2), (3, 3), (30, 1)]):
        scheduler.add(_sequence(request_id, prompt, new, 100 * request_id))
    finished = []
    while scheduler.has_work:
        step = scheduler.schedule()
        finished.append({each.request_id for each in scheduler.advance(step)})
        for part in [part for part in step if part.needs_logits]:
            part.sequence.tokens.append(1)
        for sequence in [each for each in scheduler.running if each.request_id in finished[-1]]:
            scheduler.finish(sequence)
    # The fourth is cut into chunks, of which only the last needs logits.
    assert finished[:3] == [{0}, {1}, {2}] and set().union(*finished[3:]) == {3}


def test_rows_that_want_more_than_the_most_likely_token_are_special():
    plain = _sequence(0, 3)
    drawn = RequestState(1, [1, 2], 2, SamplingParams(temperature=0.5), 0.0)
    assert ScheduledStep({plain: 3, drawn: 2}).special == [1]
    assert ScheduledStep({plain: 3}).special == []


def test_a_decode_changes_blocks_once_a_block():
    scheduler = Scheduler(BlockPool(64, 4), max_tokens=64, max_seqs=4)
    scheduler.add(_sequence(0, 4, new=9))
    changed = []
    while scheduler.has_work:
        _run_step(scheduler)
        changed.append(scheduler.changed)
    assert changed == [[0], [0], [], [], [], [0], [], [], []]


def test_a_common_prefix_is_computed_once():
    scheduler = Scheduler(BlockPool(64, 4), max_tokens=64, max_seqs=4)
    scheduler.add(_sequence(0, 10))
    assert _run_step(scheduler) == [(0, 10)]
    second = _sequence(1, 10)
    scheduler.add(second)
    assert _run_step(scheduler) == [(0, 1), (1, 2)]
    assert second.cached == 8


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


def _two_running(blocks: int = 9) -> tuple[Scheduler, RequestState, RequestState]:
    """Two sequences of four tokens in blocks of two, each with its first token sampled."""
    scheduler = Scheduler(BlockPool(blocks, 2), max_tokens=16, max_seqs=4)
    pair = _sequence(0, 4, new=9), _sequence(1, 4, new=9, start=100)
    for sequence in pair:
        scheduler.add(sequence)
    assert _run_step(scheduler) == [(0, 4), (1, 4)]
    return scheduler, *pair


def _hold_all_but(scheduler: Scheduler, free: int) -> None:
    pool = scheduler.pool
    pool.add("other")
    pool.reserve("other", (pool.available - free) * pool.block_size)


def test_the_newest_sequence_is_preempted_and_goes_to_the_head_of_the_queue():
    scheduler, old, new = _two_running()
    later = _sequence(2, 3, start=200)
    scheduler.add(later)
    _hold_all_but(scheduler, 1)  # one of two fresh blocks
    assert [part.sequence for part in scheduler.schedule()] == [old]
    assert scheduler.running == [old] and list(scheduler.waiting) == [new, later]
    assert (new.status, new.computed) == (Status.WAITING, 0)
    assert new.request_id not in scheduler.pool and scheduler.preemptions == 1


def test_a_preempted_sequence_that_was_in_the_step_already_leaves_it():
    scheduler, old, new = _two_running()
    old.tokens += [7, 8, 9]  # four to compute, so the newer one's decode comes first
    _hold_all_but(scheduler, 2)
    step = scheduler.schedule()
    assert [(part.sequence, part.count) for part in step] == [(old, 4)]
    assert list(scheduler.waiting) == [new] and scheduler.running == [old]


def test_a_preempted_request_began_and_found_its_prefix_when_it_was_first_admitted():
    scheduler, _, new = _two_running()
    begun = new.begun_s
    _hold_all_but(scheduler, 1)
    scheduler.schedule()
    scheduler.pool.free("other")
    assert new in [part.sequence for part in scheduler.schedule()]
    assert new.computed > 0  # its own blocks, found again
    assert new.cached == 0 and new.begun_s == begun is not None


def test_a_step_with_a_preemption_admits_nobody():
    scheduler, old, _ = _two_running()
    scheduler.add(_sequence(2, 1, start=200))
    _hold_all_but(scheduler, 1)
    assert [part.sequence for part in scheduler.schedule()] == [old]


def test_a_newcomer_leaves_a_block_free_for_each_running_sequence():
    for free, is_admitted in ((5, False), (6, True)):
        scheduler, *_ = _two_running(20)
        scheduler.add(_sequence(2, 4, start=200))
        _hold_all_but(scheduler, free)
        # Two blocks go to the decodes of this step, two to the newcomer, two stay spare.
        step = scheduler.schedule()
        assert ([part.sequence.request_id for part in step] == [0, 1, 2]) == is_admitted
        assert len(scheduler.waiting) == (not is_admitted)


def test_requests_of_another_salt_share_nothing():
    scheduler = Scheduler(BlockPool(64, 4), max_tokens=64, max_seqs=4)
    for request_id, salt in enumerate((None, "tenant", b"tenant", "tenant")):
        sequence = _sequence(request_id, 10)
        sequence.salt = salt
        scheduler.add(sequence)
        shape = dict(_run_step(scheduler))
        assert shape[request_id] == (2 if request_id == 3 else 10)


def test_blocks_of_another_salt_do_not_count_when_a_request_is_admitted():
    scheduler = Scheduler(BlockPool(7, 4), max_tokens=64, max_seqs=4)
    first, second = _sequence(0, 13, new=9), _sequence(1, 13)
    first.salt = "a"
    for sequence in (first, second):
        scheduler.add(sequence)
    assert _run_step(scheduler) == [(0, 13)]
    assert _run_step(scheduler) == [(0, 1)]  # two blocks are free, and the second needs five
    assert list(scheduler.waiting) == [second]


def test_prompts_that_are_scored_share_the_rows_of_logits_of_a_step():
    scheduler = Scheduler(BlockPool(64, 4), max_tokens=64, max_seqs=8)
    for request_id in range(3):
        scheduler.add(_sequence(request_id, 6, start=100 * request_id, scored=True))
    assert _run_step(scheduler) == [(0, 6), (1, 2)]
    assert _run_step(scheduler) == [(0, 1), (1, 4), (2, 3)]


def test_a_long_prompt_that_is_scored_leaves_a_row_to_who_comes():
    scheduler = Scheduler(BlockPool(64, 4), max_tokens=64, max_seqs=4)
    scheduler.add(_sequence(0, 60, scored=True))
    assert _run_step(scheduler) == [(0, 4)]
    for request_id in (1, 2):
        scheduler.add(_sequence(request_id, 9, start=1000 * request_id))
    assert _run_step(scheduler) == [(0, 3), (1, 9)]
    assert _run_step(scheduler) == [(1, 1), (0, 2), (2, 9)]
    assert _run_step(scheduler) == [(1, 1), (2, 1), (0, 2)]


def test_after_a_restart_all_sequences_wait_in_order_with_nothing_computed():
    scheduler, old, new = _two_running()
    later = _sequence(2, 3, start=200)
    pool = BlockPool(9, 2)
    for _ in range(2):
        scheduler.restart(pool, [later, new, old])
        assert list(scheduler.waiting) == [old, new, later] and scheduler.running == []
        assert {s.computed for s in (old, new, later)} == {0} and scheduler.pool is pool
    assert _run_step(scheduler) == [(0, 5), (1, 5)]
    assert len(old.tokens) == 6


def test_a_sequence_that_failed_leaves_nothing_in_the_prefix_index():
    scheduler = Scheduler(BlockPool(64, 4), max_tokens=64, max_seqs=4)
    failed = _sequence(0, 10)
    scheduler.add(failed)
    _run_step(scheduler)
    scheduler.finish(failed, has_failed=True)
    scheduler.add(_sequence(1, 10))
    assert _run_step(scheduler) == [(1, 10)]


@given(
    requests=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(0, 2), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    budget=st.integers(4, 40),
    num_blocks=st.integers(12, 40),
)
def test_every_request_finishes_with_all_its_tokens_and_no_block_leaks(
    requests, budget, num_blocks
):
    pool = BlockPool(num_blocks, 4)
    scheduler = Scheduler(pool, max_tokens=budget, max_seqs=4)
    sequences = [
        _sequence(i, prompt, new, 100 * start, scored=scored)
        for i, (prompt, new, start, scored) in enumerate(requests)
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    for _ in range(5000):
        if not scheduler.has_work:
            break
        shape = _run_step(scheduler)
        assert shape and sum(count for _, count in shape) <= budget
        assert len({index for index, _ in shape}) == len(shape)
        assert sum(count if requests[index][3] else 1 for index, count in shape) <= 4
    assert not scheduler.has_work
    for sequence, (prompt, new, *_) in zip(sequences, requests, strict=True):
        assert len(sequence.tokens) == prompt + new
    assert pool.stats().used == 0 and pool.requests == []
