"""Random traces that favour edge cases: tiny pools, shared prefixes, block borders, overload."""

from __future__ import annotations

import random
from dataclasses import replace

from compiled_attn.testing.fuzz.target import Target
from compiled_attn.testing.fuzz.trace import Operation, Settings, Trace

__all__ = ["generate", "random_settings"]

_WEIGHTS = (0.0, 0.3, 1.0, 3.0)
_OPTIONAL = ("share", "fork", "abort", "preempt", "defragment", "draft")


def random_settings(rng: random.Random, target: type[Target]) -> Settings:
    """Returns random sizes of an engine, mostly with a pool that few requests fill."""
    size = rng.choice(target.block_sizes)
    longest = rng.randint(min(target.longest, 2 * size + 2), target.longest)
    context = rng.choice((longest, max(3, longest // size * size + rng.randint(-1, 1))))
    context = min(context, target.longest)
    least = -(-context // size)
    seqs = rng.choice((1, 2, 3, 4, 8))
    return Settings(
        family=rng.choice(target.families),
        block_size=size,
        num_blocks=least + rng.choice((0, 0, 1, 2, least, 4 * least)),
        max_seqs=seqs,
        max_tokens=max(seqs, rng.choice((1, 3, size, size + 1, 16, 64))),
        context=context,
    )


def generate(
    seed: int, target: type[Target], requests: int = 200, settings: Settings | None = None
) -> Trace:
    """Returns a random trace, the same for the same arguments.

    The mix of operations is random too: some traces never abort, some rarely step.

    Args:
        seed: seed of all random choices.
        target: target class, for the sizes and operations that it supports.
        requests: minimum number of requests.
        settings: sizes of the engine; None: random.
    """
    rng = random.Random(seed)
    sizes = random_settings(rng, target)
    return _Generator(rng, sizes if settings is None else settings, target.supports).trace(requests)


class _Generator:
    def __init__(self, rng: random.Random, settings: Settings, supports: frozenset[str]) -> None:
        self.rng, self.settings, self.supports = rng, settings, supports
        weights = {kind: rng.choice(_WEIGHTS) for kind in _OPTIONAL}
        weights |= {"submit": 1.0, "again": rng.choice(_WEIGHTS)}
        allowed = supports | {"submit", "again", "share"}
        self.weights = {kind: weight for kind, weight in weights.items() if kind in allowed}
        self.alphabet = rng.choice((2, 16, 48, 48))
        self.stems = [self.tokens(settings.context) for _ in range(rng.choice((1, 2, 5)))]
        self.pace = rng.choice((0.3, 1.0, 3.0))  # steps per operation
        self.sampled = rng.choice((0.0, 0.2)) if "sample" in supports else 0.0
        self.salted = rng.choice((0.0, 0.3)) if "salt" in supports else 0.0
        self.next_id = 0
        self.made: list[Operation] = []

    def trace(self, requests: int) -> Trace:
        operations: list[Operation] = []
        kinds, weights = [*self.weights], [*self.weights.values()]
        while self.next_id < requests:
            kind = self.rng.choices(kinds, weights)[0]
            operations += self.operation(kind)
            if self.rng.random() < self.pace / (1 + self.pace):
                count = 1 + int(self.rng.expovariate(1 / self.pace))
                operations.append(Operation("step", count=count))
        return Trace(self.settings, tuple(operations))

    def operation(self, kind: str) -> list[Operation]:
        rng = self.rng
        if kind in ("preempt", "defragment"):
            return [Operation(kind)]
        if kind == "draft":
            return [Operation(kind, count=rng.randint(0, 4))]
        if kind in ("abort", "share", "again") and not self.made:
            return []
        if kind == "abort":  # mostly a recent one, which is still waiting or running
            at = min(len(self.made), 1 + int(rng.expovariate(0.3)))
            return [Operation(kind, self.made[-at].request)]
        count = rng.randint(2, 4) if kind == "fork" else 1
        fields = {"request": self.next_id, "count": count}
        if kind == "again":
            old = rng.choice(self.made)
            count = old.count
            made = replace(old, request=self.next_id)
        else:
            made = self.request(kind, fields)
        self.next_id += count
        self.made.append(made)
        return [made]

    def request(self, kind: str, fields: dict[str, int]) -> Operation:
        rng, context = self.rng, self.settings.context
        new = min(context - 1, 1 + int(rng.expovariate(1 / rng.choice((1, 3, 8)))))
        length = self.length(context - new)
        of = keep = 0
        if kind == "share":
            of, keep = rng.choice(self.made[-16:]).request, rng.randint(0, length - 1)
            prompt = self.tokens(min(length - keep, rng.randint(1, 4)))
        else:
            stem = rng.choice(self.stems)
            common = rng.choice((0, length, rng.randint(0, length), max(0, length - 1)))
            prompt = stem[:common] + self.tokens(length - common)
        return Operation(
            kind,
            prompt=prompt,
            new_tokens=new,
            salt=rng.choice("ab") if rng.random() < self.salted else None,
            seed=rng.randrange(1 << 32) if rng.random() < self.sampled else None,
            of=of,
            keep=keep,
            **fields,
        )

    def length(self, most: int) -> int:
        """Returns a random length; half of them are around block borders."""
        rng, size = self.rng, self.settings.block_size
        length = rng.randint(1, most)
        if rng.random() < 0.5:
            length = rng.randint(0, most // size) * size + rng.randint(-1, 1)
        if rng.random() < 0.3:
            length = rng.randint(1, min(most, 4))
        return min(most, max(1, length))

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(1, 1 + self.alphabet) for _ in range(count))
