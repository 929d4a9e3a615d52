"""The cost of a call does not depend on the number of blocks."""

from __future__ import annotations

import numpy as np

from compiled_attn.cache.blocks import BlockPool
from tests.compiled_attn.cache.blocks.pools import perform_copies
from tests.compiled_attn.work import lines_run


def test_every_call_costs_the_same_however_large_the_pool_is() -> None:
    """Pools that are full of cached, used and free blocks: lines executed a call, no time."""
    work = [costs(full_pool(num_blocks)) for num_blocks in (10**3, 10**5)]
    for small, large in zip(*work, strict=True):
        assert large <= 1.5 * small + 20


def full_pool(num_blocks: int) -> BlockPool:
    pool = BlockPool(num_blocks, 4)
    share = (num_blocks - 300) // 40
    for number in range(20):
        tokens = np.arange(4 * share) + 10**7 * number
        if num_blocks == 10**5:  # enough of them to be many, few enough to be quick
            tokens = tokens[: len(tokens) // 5]
        pool.add(number)
        pool.reserve(number, 4 * share)
        pool.commit(number, tokens, len(tokens))
        pool.add(("plain", number))
        pool.reserve(("plain", number), 4 * share)
    for number in range(0, 20, 2):
        pool.free(number)
        pool.free(("plain", number))
    return pool


def costs(pool: BlockPool) -> list[int]:
    with_free_blocks = costs_of_a_life(pool)
    pool.add("all that is free")
    pool.reserve("all that is free", pool.stats().free * pool.block_size)
    assert pool.stats().free == 0
    evictions = pool.stats().evictions
    with_evictions = costs_of_a_life(pool)
    assert pool.stats().evictions > evictions + 3
    return with_free_blocks + with_evictions


def costs_of_a_life(pool: BlockPool) -> list[int]:
    prompt = [*range(10**7, 10**7 + 30), *[-1] * 20]  # request 1 has computed what it begins with
    longer = [*prompt, *range(10)]
    calls = [
        lambda: pool.can_allocate(60, prompt),
        lambda: pool.add("a", prompt),
        lambda: pool.reserve("a", 50),
        lambda: perform_copies(pool),
        lambda: pool.commit("a", prompt, 50),
        lambda: pool.fork("a", "b"),
        lambda: pool.append("b", 10),
        lambda: perform_copies(pool),
        lambda: pool.commit("b", longer, 60),
        lambda: pool.preempt("b"),
        lambda: pool.exchange(pool.compaction(8)),
        lambda: pool.free("a"),
        lambda: pool.stats(),
    ]
    return [lines_run(call) for call in calls]
