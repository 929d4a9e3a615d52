"""Any sequence of calls to the pool, against a naive model of it and of the memory it manages.

Every slot of the modelled cache holds a payload: the salt and the token history up to there. A
freshly allocated block is poisoned, so is the source of a move. Positions that a table declares
computed must show exactly the payload of its own tokens, whoever wrote it and however often it was
moved.
The model predicts every block id that the pool allocates.
"""

from __future__ import annotations

import random

import pytest

from tests.compiled_attn.cache.blocks.pool_model import NAMES, ModelledPool
from tests.compiled_attn.cache.blocks.window_model import WindowedPool
from tests.slow import slow_but


def prompt(common: int, tail: list[int]) -> list[int]:
    """Mostly one common prefix, so that prompts hit each other's blocks."""
    return [0] * common + tail


EVENTS = ["add", "add", "fork", "fork", "append", "append", "append", "reserve"]
EVENTS += ["step", "step", "free", "free", "copy", "misuse", "swap", "shuffle", "ask"]


def random_event(both: ModelledPool, rng: random.Random) -> None:
    """One event of a crowded server: mostly appends and steps, often short of blocks."""
    live, unused = list(both.rows), [name for name in NAMES if name not in both.rows]
    event = rng.choice(EVENTS)
    if event in ("add", "fork") and unused:
        if event == "fork" and live:
            both.fork(rng.choice(live), unused[0])
        else:
            tail = rng.choices((0, 1), k=rng.randrange(4))
            both.add(unused[0], prompt(rng.randrange(13), tail), rng.choice((None, None, "x")))
            if rng.random() < 0.05:
                both.fill(unused[0], 0)
    elif live and event in ("append", "reserve"):
        name = rng.choice(live)
        more = 1 if event == "append" else rng.randrange(12)
        both.reserve(name, both.rows[name].length + more, rng.randrange(2))
    elif live and event == "step":
        both.step(rng.choice(live), rng.choice((0.5, 1.0)))
        if rng.random() < 0.1:
            both.withdraw(rng.choice(live))
        if isinstance(both, WindowedPool):
            both.release(rng.choice(live), rng.choice((0.5, 0.8, 1.0)))
    elif live and event == "free":
        both.free(rng.choice(live), preempt=rng.random() < 0.5)
    elif live and event == "misuse":
        both.misuse(rng.choice(live))
    elif event == "swap":
        both.swap(rng.randrange(1, 9), rng.randrange(3))
    elif event == "shuffle":
        both.shuffle(rng.randrange(256))
    elif event == "copy":
        both.copy(rng.randrange(3))
    elif event == "ask":
        tokens, salt = prompt(rng.randrange(13), [0, 1]), rng.choice((None, None, "x"))
        both.ask_for_room(tokens, salt, rng.randrange(41))


@pytest.mark.parametrize(
    ("size", "window"), slow_but([(1, 3), (2, 4)], [(1, 3), (2, 1), (2, 4), (4, 3)])
)
def test_pool_and_model_agree_when_blocks_before_a_window_are_released(
    size: int, window: int
) -> None:
    both = WindowedPool(5 + 24 // size, size, window)
    rng = random.Random(size)
    for _ in range(4_000):
        random_event(both, rng)
        both.check()
    seen = {name for name, count in both.counts.items() if count > 10}
    assert {"released", "hits beyond null blocks", "withdrawn after release", "evictions"} <= seen


@pytest.mark.parametrize("size", slow_but((2, 4), (1, 2, 3, 4)))
def test_pool_and_model_agree_over_thousands_of_random_events(size: int) -> None:
    both = ModelledPool(num_blocks=5 + 24 // size, size=size)
    rng = random.Random(size + 2)
    for _ in range(12_000):
        random_event(both, rng)
        both.check()
    seen = {name for name, count in both.counts.items() if count > 20}
    required = {"evictions", "hits", "preemptions", "out of blocks", "moves", "withdrawn"}
    if size > 1:
        required |= {"copies"}
    assert required <= seen
    if size == 4:  # these are rare
        assert {"heirs", "touched", "copied in parts"} <= both.counts.keys()
