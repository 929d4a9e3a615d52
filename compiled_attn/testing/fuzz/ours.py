"""This project's engine as a target of the fuzzer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.engine.speculation.drafter import Ngrams
from compiled_attn.errors import AdapterError, ConfigError
from compiled_attn.testing.fuzz.drafts import FreeRows, RepeatedPrompts
from compiled_attn.testing.fuzz.models import (
    FAMILIES,
    DenseReference,
    adapters_of,
    most_likely,
    tiny_model,
)
from compiled_attn.testing.fuzz.target import Reference, Refused, Target
from compiled_attn.testing.fuzz.trace import Settings

__all__ = ["Ours"]


class Ours(Target):
    """`Engine` with a tiny model and the eager backend; ``config`` overrides its `EngineConfig`.

    With ``speculate`` it drafts wherever it can, not only where that is faster; with
    ``max_adapters`` requests take turns to use none or one of as many adapters, which are removed
    and added again meanwhile.
    """

    supports: ClassVar = frozenset(["abort", "fork", "preempt", "defragment", "salt", "sample"])
    families: ClassVar = tuple(FAMILIES)

    def __init__(self, settings: Settings, **config: Any) -> None:
        super().__init__(settings)
        sizes = {"block_size": settings.block_size, "num_blocks": settings.num_blocks + 1,
                 "max_seqs": settings.max_seqs, "max_tokens_per_step": settings.max_tokens,
                 "context": settings.context, "backend": "eager",
                 "max_graphs": 8 if config.get("speculate") else 2,
                 "defrag_waste": 0.25}  # fmt: skip
        self.reference = DenseReference.of(settings.family, choices)
        self.engine = Engine(tiny_model(settings.family), EngineConfig(**{**sizes, **config}))
        self.engine.warmup()
        self._draft_always()
        count = self.engine.config.max_adapters
        self._adapters = adapters_of(settings.family, count, choices) if count else []
        self._adapter_of: dict[int, int] = {}  # by request, from 1 on
        self._names: dict[int, int] = {}  # our request ids by those of the engine
        self._later: list[tuple[int, int, tuple[Any, ...]]] = []  # continuations not submitted yet

    def _draft_always(self) -> None:
        drafter = self.engine.scheduler.drafter
        if drafter is not None:
            drafter._costs = FreeRows(self.engine.sizing.buckets, {})
            if isinstance(drafter._source, Ngrams):
                drafter._source = RepeatedPrompts()

    def submit(
        self, request: int, prompt: Sequence[int], new_tokens: int, *,
        salt: str | None = None, seed: int | None = None, count: int = 1,
    ) -> None:  # fmt: skip
        """Submits further continuations after the first has computed the prompt."""
        params = SamplingParams(
            new_tokens, temperature=float(seed is not None), seed=seed, n=count,
            adapter=self._adapter(request, count),
        )  # fmt: skip
        first = self._submit(request, prompt, params.continuation(0), salt)
        for n in range(1, count):
            self._later.append((first, request + n, (prompt, params.continuation(n), salt)))

    def _adapter(self, request: int, count: int) -> str | None:
        """Chooses the adapter of new continuations, and adds it if it is missing."""
        number = request % (1 + len(self._adapters))
        self._adapter_of |= dict.fromkeys(range(request, request + count), number)
        if not number:
            return None
        name, named = str(number), self.engine.adapters
        if name in named.names and request % 5 == 0 and not self._later:
            named.remove(name)
        if name not in named.names:
            try:
                named.add(name, self._adapters[number - 1][0])
            except AdapterError as error:  # its slot is still in use
                raise Refused(str(error)) from error
        return name

    def reference_of(self, request: int) -> Reference:
        """That of the request's adapter."""
        number = self._adapter_of.get(request, 0)
        return self._adapters[number - 1][1] if number else self.reference

    def _submit(self, request: int, prompt: Sequence[int], params: Any, salt: str | None) -> int:
        try:
            name = self.engine.submit(prompt, params, salt=salt)
        except ConfigError as error:
            raise Refused(str(error)) from error
        self._names[name] = request
        return name

    def step(self) -> Mapping[int, Sequence[int]]:
        """Returns the new tokens of a step; raises if a request failed."""
        due = [each for each in self._later if self.engine.has_started(each[0])]
        self._later = [each for each in self._later if each not in due]
        for _, request, call in due:
            self._submit(request, *call)
        tokens: dict[int, list[int]] = {}
        for event in self.engine.step():
            if event.token is None:
                raise RuntimeError(f"{event.result}")
            tokens.setdefault(self._names[event.request_id], []).append(event.token)
        return tokens

    def abort(self, request: int, count: int) -> None:
        """Aborts those that are waiting or running."""
        ids = range(request, request + count)
        self._later = [each for each in self._later if each[1] not in ids]
        for name in self.engine.open_requests:
            if self._names[name] in ids:
                self.engine.abort(name)

    def preempt(self) -> None:
        """Preempts the newest running request."""
        if running := self.engine.scheduler.running:
            self.engine.scheduler.preempt(running[-1])

    def defragment(self) -> None:
        """Defragments now."""
        if self.engine.memory.defragmenter is not None:
            self.engine.memory.defragmenter.defragment()

    def check(self, is_idle: bool) -> str:
        """Checks that only running requests own blocks, none leaks, and nothing compiled."""
        pool, engine = self.engine.pool, self.engine
        stats = pool.stats()
        held = [block for name in pool.requests for block in pool.table(name).blocks]
        tables = [block for block in held if block]  # 0: before a sliding window
        running = {each.request_id for each in engine.scheduler.running}
        problems = {
            "block counts do not add up": stats.used + stats.cached + stats.free != stats.total,
            "reference counts differ from the tables": not np.array_equal(
                np.bincount(tables, minlength=pool.num_blocks), pool.refcounts
            ),
            "requests own blocks without running": {*pool.requests} != running,
            "something compiled": bool(engine.sentinel.compiles + engine.sentinel.late_builds),
            "a step was rolled back": bool(engine.restarts),
            "blocks are used while idle": is_idle and bool(stats.used),
            "requests are open while idle": is_idle and engine.has_work,
        }
        return "; ".join(f"{problem}: {stats}" for problem, is_true in problems.items() if is_true)

    def counts(self) -> Mapping[str, int]:
        """Counts preemptions, evictions, moved blocks, prefix hits, sanitized steps, and tokens of
        drafts.
        """
        stats, memory = self.engine.memory.stats(), self.engine.memory.figures()
        watch = self.engine._steps.watch
        return {"preemptions": stats.preemptions, "evictions": stats.evictions,
                "moves": int(memory.get("defrag_moves", 0)), "hits": stats.hit_tokens,
                "sanitized": 0 if watch is None else watch.ledger.step,
                **{kind: sum(n) for kind, n in self.engine.tally.drafts().items()}}  # fmt: skip

    def reset(self) -> bool:
        """Empties the pool of an idle engine."""
        is_idle = not (self.engine.has_work or self._later)
        if is_idle:
            self._names.clear()
            self._adapter_of.clear()
            self.engine.memory.reset()
            self.engine.scheduler.restart(self.engine.pool, [])
            self._draft_always()
        return is_idle


def choices(
    logits: NDArray[np.float64], seed: int | None, step: int, error: float
) -> NDArray[np.int64]:
    """Samples as the engine does: a position in the cumulative weights, by descending logit.

    Its random number depends on seed and step only. Errors reorder tokens within two of them, and
    move the bounds of their weights in the sum.
    """
    if seed is None:
        return most_likely(logits, seed, step, error)
    row = logits.astype(np.float32)  # in which ties of the engine are ties
    tokens: NDArray[np.int64] = np.argsort(-row, kind="stable")
    uniform = np.random.Generator(np.random.Philox(key=seed, counter=step)).random()
    ordered = row[tokens].astype(np.float64)
    weights = np.exp(ordered - ordered[0])
    sums = np.append(0.0, weights.cumsum())
    exact = min(np.searchsorted(sums[1:], uniform * sums[-1], side="right"), len(tokens) - 1)
    surely_before = np.searchsorted(-ordered, -ordered - 2 * error, side="left")
    maybe_before = np.searchsorted(-ordered, -ordered + 2 * error, side="right")
    # Of the tokens before: each weight is e^error smaller, and every other larger; or the reverse.
    before, after = sums[surely_before] * np.exp(-2 * error), sums[-1] - sums[surely_before]
    start = before / (before + after)
    before, after = sums[maybe_before] * np.exp(2 * error), sums[-1] - sums[maybe_before]
    end = before / (before + after)
    others = np.flatnonzero((start <= uniform) & (uniform <= end))
    found: NDArray[np.int64] = tokens[np.append(exact, others[others != exact])]
    return found
