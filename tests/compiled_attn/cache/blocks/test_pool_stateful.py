"""Any sequence of calls to the pool, against a naive model of it and of the memory it manages.

Every slot of the modelled cache holds a payload: the salt and the token history up to there. A
freshly allocated block is poisoned, so is what a move left behind. What a table declares computed
must show exactly the payload of its own tokens, whoever wrote it and however often it was moved.
The model predicts every block id that the pool hands out.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.compiled_attn.cache.blocks.pool_model import NAMES, ModelledPool
from tests.slow import slow_but

PICK = st.integers(0, len(NAMES) - 1)
TOKEN = st.integers(0, 1)
SALT = st.sampled_from([None, None, "x"])


def prompt(common: int, tail: list[int]) -> list[int]:
    """Mostly one common prefix, so that prompts hit each other's blocks."""
    return [0] * common + tail


PROMPT = st.builds(prompt, st.integers(0, 12), st.lists(TOKEN, max_size=3))


class BlockPoolMachine(RuleBasedStateMachine):
    both: ModelledPool

    @initialize(num_blocks=st.integers(2, 16), size=st.integers(1, 4))
    def make(self, num_blocks: int, size: int) -> None:
        self.both = ModelledPool(num_blocks, size)

    def live(self, pick: int) -> str:
        return list(self.both.rows)[pick % len(self.both.rows)]

    def unused(self, pick: int) -> str:
        names = [name for name in NAMES if name not in self.both.rows]
        return names[pick % len(names)]

    @precondition(lambda self: len(self.both.rows) < len(NAMES))
    @rule(pick=PICK, tokens=PROMPT, salt=SALT, run=st.booleans())
    def add(self, pick: int, tokens: list[int], salt: str | None, run: bool) -> None:
        name = self.unused(pick)
        self.both.add(name, tokens, salt)
        if run:
            self.both.reserve(name, len(tokens), 0)
            self.both.step(name, 1.0)

    @rule(tokens=PROMPT, salt=SALT, length=st.integers(0, 40))
    def ask_for_room(self, tokens: list[int], salt: str | None, length: int) -> None:
        self.both.ask_for_room(tokens, salt, length)

    @precondition(lambda self: self.both.rows)
    @rule(pick=PICK, more=st.integers(-3, 14), token=TOKEN)
    def reserve(self, pick: int, more: int, token: int) -> None:
        name = self.live(pick)
        self.both.reserve(name, max(0, self.both.rows[name].length + more), token)

    @precondition(lambda self: self.both.rows)
    @rule(pick=PICK, token=TOKEN)
    def append(self, pick: int, token: int) -> None:
        name = self.live(pick)
        self.both.reserve(name, self.both.rows[name].length + 1, token)

    @precondition(lambda self: self.both.rows)
    @rule(pick=PICK, token=TOKEN)
    def fill(self, pick: int, token: int) -> None:
        self.both.fill(self.live(pick), token)

    @precondition(lambda self: self.both.rows)
    @rule(pick=PICK, share=st.sampled_from([0.5, 1.0]))
    def step(self, pick: int, share: float) -> None:
        self.both.step(self.live(pick), share)

    @precondition(lambda self: self.both.rows)
    @rule(pick=PICK)
    def withdraw(self, pick: int) -> None:
        self.both.withdraw(self.live(pick))

    @precondition(lambda self: 0 < len(self.both.rows) < len(NAMES))
    @rule(pick=PICK, child=PICK)
    def fork(self, pick: int, child: int) -> None:
        self.both.fork(self.live(pick), self.unused(child))

    @precondition(lambda self: self.both.rows)
    @rule(pick=PICK, preempt=st.booleans(), again=st.booleans())
    def free(self, pick: int, preempt: bool, again: bool) -> None:
        name = self.live(pick)
        row = self.both.free(name, preempt)
        if again:
            self.both.add(name, row.tokens, row.salt)

    @rule(skipped=st.integers(0, 2))
    def copy(self, skipped: int) -> None:
        self.both.copy(skipped)

    @rule(limit=st.integers(1, 8), skipped=st.integers(0, 2))
    def swap(self, limit: int, skipped: int) -> None:
        self.both.swap(limit, skipped)

    @rule(pick=st.integers(0, 255))
    def shuffle(self, pick: int) -> None:
        self.both.shuffle(pick)

    @precondition(lambda self: self.both.rows)
    @rule(pick=PICK)
    def misuse(self, pick: int) -> None:
        self.both.misuse(self.live(pick))

    @invariant()
    def pool_and_model_agree(self) -> None:
        self.both.check()


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(stateful_step_count=50)


EVENTS = ["add", "add", "fork", "fork", "append", "append", "append", "reserve"]
EVENTS += ["step", "step", "free", "free", "copy", "misuse", "swap", "shuffle"]


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


@pytest.mark.parametrize("size", slow_but((4,), (1, 2, 3, 4)))
def test_pool_and_model_agree_over_thousands_of_random_events(size: int) -> None:
    both = ModelledPool(num_blocks=5 + 24 // size, size=size)
    rng = random.Random(size)
    for _ in range(12_000):
        random_event(both, rng)
        both.check()
    seen = {name for name, count in both.counts.items() if count > 20}
    wanted = {"evictions", "hits", "preemptions", "out of blocks", "moves", "withdrawn"}
    if size > 1:
        wanted |= {"copies"}
    assert wanted <= seen
    assert {"heirs", "touched", *(["copied in parts"] if size > 1 else [])} <= both.counts.keys()
