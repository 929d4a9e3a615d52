from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from compiled_attn.cache.blocks.states import BlockSet, BlockStates
from tests.compiled_attn.state import state_of


def taken(count: int, num_blocks: int = 20) -> BlockStates:
    states = BlockStates(num_blocks)
    assert [states.take() for _ in range(count)] == list(range(1, count + 1))
    return states


@pytest.mark.parametrize("size", [1, 2, 1023, 1024, 1025, 2**20, 2**20 + 1])
def test_a_full_set_has_all_members_and_nothing_beyond(size: int) -> None:
    members = BlockSet(size, full=True)
    assert (len(members), members.lowest(), members.highest()) == (size, 0, size - 1)
    assert next(members.descending()) == size - 1
    assert size - 1 in members
    assert len(BlockSet(size)) == 0 and 0 not in BlockSet(size)
    assert list(BlockSet(size).ascending()) == []


def test_a_set_agrees_with_the_built_in_one_over_random_calls() -> None:
    rng = random.Random(0)
    size = 3 * 2**20
    pool = [rng.randrange(size) for _ in range(200)] + [0, size - 1, 1023, 1024, 2**20]
    members, model = BlockSet(size), set[int]()
    for _ in range(3000):
        member = rng.choice(pool)
        if member in model:
            members.remove(member)
        else:
            members.add(member)
        model ^= {member}
        assert (member in members, len(members)) == (member in model, len(model))
        if model:
            assert (members.lowest(), members.highest()) == (min(model), max(model))
    assert list(members.ascending()) == sorted(model)
    assert list(members.descending()) == sorted(model, reverse=True)


# States


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.has_content(0), "expected block >= 1, got 0"),
        (lambda s: s.exchange([(1, 9), (0, 2)]), "expected block >= 1, got 0"),
        (lambda s: s.exchange([(1, 9), (-1, 2)]), "expected block >= 1, got -1"),
        (lambda s: s.exchange([(1, 9), (3, 20)]), "expected block < 20, got 20"),
        (lambda s: s.exchange([(1, 9), (3, 9)]), "expected every block once, got block 9 twice"),
        (lambda s: s.exchange([(1, 9), (9, 3)]), "expected every block once, got block 9 twice"),
        (lambda s: s.exchange([(1, 9), (3, 3)]), "expected every block once, got block 3 twice"),
        (lambda s: s.compaction(-1), "expected limit >= 0, got -1"),
    ],
)
def test_bad_input_is_named_and_changes_nothing(
    call: Callable[[BlockStates], object], message: str
) -> None:
    states = taken(4)
    states.cache(2)
    before = state_of(states)
    with pytest.raises(ValueError, match=message):
        call(states)
    assert state_of(states) == before
