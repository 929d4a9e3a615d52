"""A paged engine in plain Python with bugs to plant, whose model hashes the tokens it reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compiled_attn.testing.fuzz import Settings, Target
from compiled_attn.testing.fuzz.models import most_likely

VOCAB = 50


def next_token(text: Sequence[int]) -> int:
    value = 7
    for token in text:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCAB


class Hashes:
    """Logits of the toy model; the second best token is ``gap`` below the best one."""

    def __init__(self, gap: float = 1.0) -> None:
        self.gap = gap

    def logits(self, texts):
        found = []
        for text in texts:
            rows = np.zeros((len(text), VOCAB))
            for at in range(len(text)):
                best = next_token(text[: at + 1])
                rows[at, best] = 1
                rows[at, (best + 1) % VOCAB] = 1 - self.gap
            found.append(rows)
        return found

    def rounding(self, text):
        return 0.01

    def choices(self, logits, seed, step, error):
        return most_likely(logits, seed, step, error)


class Toy(Target):
    """Requests own blocks of a cache of tokens; equal prefixes share full blocks."""

    supports = frozenset(["abort", "preempt"])
    longest = 24
    bug = ""

    def __init__(self, settings: Settings, gap: float = 1.0) -> None:
        super().__init__(settings)
        self.reference = Hashes(gap)
        self.size = settings.block_size
        self.cache = [0] * (settings.num_blocks * self.size)
        self.free = list(range(settings.num_blocks))
        self.waiting: dict[int, list] = {}
        self.running: dict[int, list] = {}  # text, tokens to go, blocks
        self.steps = self.aborts = 0

    def submit(self, request, prompt, new_tokens, **_):
        self.waiting[request] = [[*prompt], new_tokens, []]

    def abort(self, request, count):
        self.aborts += 1
        if request in self.running:
            self.release(request, leaks=self.bug == "leak")
            del self.running[request]
        elif self.bug == "dropped" and len(self.waiting) > 2:
            self.waiting.popitem()  # not necessarily this one
            self.waiting.pop(request, None)
        else:
            del self.waiting[request]

    def preempt(self):
        if self.running:
            name = next(reversed(self.running))
            self.release(name)
            self.waiting = {name: self.running.pop(name), **self.waiting}

    def step(self):
        self.steps += 1
        while self.waiting and len(self.running) < self.settings.max_seqs:
            name = next(iter(self.waiting))
            request = self.waiting[name]
            need = -(-(len(request[0]) + request[1]) // self.size)
            if need > len(self.free):
                break
            request[2] = [self.free.pop() for _ in range(need)]
            self.running[name] = self.waiting.pop(name)
        return {name: self.decode(name) for name in [*self.running]}

    def decode(self, name):
        request = self.running[name]
        text, _, blocks = request
        slots = [block * self.size + at for block in blocks for at in range(self.size)]
        for slot, token in zip(slots, text, strict=False):
            self.cache[slot] = token
        if self.bug == "swapped" and len(blocks) > 2:
            slots = slots[self.size : 2 * self.size] + slots[: self.size] + slots[2 * self.size :]
        token = next_token([self.cache[slot] for slot in slots[: len(text)]])
        text.append(token)
        request[1] -= 1
        if not request[1]:
            self.release(name)
            del self.running[name]
        return [] if self.bug == "lost" and len(self.running) == 3 else [token]

    def release(self, name, leaks=False):
        blocks = self.running[name][2]
        self.free += blocks[1:] if leaks else blocks
        self.running[name][2] = []

    def check(self, is_idle):
        held = sum(len(each[2]) for each in self.running.values())
        total = self.settings.num_blocks
        return "" if held + len(self.free) == total else f"{total - held - len(self.free)} leaked"

    def counts(self):
        return {"aborts": self.aborts}


def with_bug(name: str) -> type[Toy]:
    return type("Toy", (Toy,), {"bug": name})
