"""What a target of the fuzzer is: an engine behind an adapter, steps in, tokens out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from compiled_attn.testing.fuzz.trace import Settings

__all__ = ["Reference", "Refused", "Target"]


class Refused(Exception):
    """Raised by `Target.submit` for a request that the engine refuses; it is not a failure."""


class Reference(Protocol):
    """The model of a target without an engine: what a request must yield, served alone."""

    def logits(self, texts: Sequence[Sequence[int]]) -> list[NDArray[np.float64]]:
        """Logits ``[len(text), vocab]`` of each text, in the highest precision there is."""
        ...

    def rounding(self, text: Sequence[int]) -> float:
        """By how much the logits of a text may differ in the precision of the target."""
        ...

    def choose(self, logits: NDArray[np.float64], seed: int | None, step: int) -> int:
        """The token of a row of logits after ``step`` generated ones; see `Operation.seed`."""
        ...


class Target:
    """An engine for the settings of a trace: override `submit` and `step`, and what it supports.

    Attributes:
        reference: of the model that it serves; set by the subclass.
        supports: kinds of operations beyond submit, share and step, and "salt", "sample" for these
            options of requests; others are skipped or left out.
        block_sizes, families: values that the settings of a trace may have.
        longest: tokens of a request at most.
        same_settings: so many traces in a row have the same settings, if an engine is slow to make.
    """

    supports: ClassVar[frozenset[str]] = frozenset()
    block_sizes: ClassVar[tuple[int, ...]] = (1, 2, 3, 4, 5, 8, 16)
    families: ClassVar[tuple[str, ...]] = ("llama",)
    longest: ClassVar[int] = 64
    same_settings: ClassVar[int] = 1
    reference: Reference

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def submit(
        self,
        request: int,
        prompt: Sequence[int],
        new_tokens: int,
        *,
        salt: str | None = None,
        seed: int | None = None,
        count: int = 1,
    ) -> None:
        """Queues ``count`` continuations of a prompt, whose ids begin at ``request``.

        Each yields ``new_tokens`` tokens: none ends it early. Raises `Refused` if they can never be
        served.
        """
        raise NotImplementedError

    def step(self) -> Mapping[int, Sequence[int]]:
        """Computes a step; returns the new tokens of each request."""
        raise NotImplementedError

    def abort(self, request: int, count: int) -> None:
        """Drops all continuations of a request, of which at least one has not finished."""

    def preempt(self) -> None:
        """Takes the blocks of a running request, if there is one."""

    def defragment(self) -> None:
        """Moves blocks, if there is anything to move."""

    def draft(self, count: int) -> None:
        """Speculates so many tokens a step from now on."""

    def check(self, is_idle: bool) -> str:
        """Returns a violated invariant of the state between steps, "" if there is none.

        ``is_idle``: all requests have finished, nothing may be in use.
        """
        return ""

    def counts(self) -> Mapping[str, int]:
        """Returns what happened inside, such as preemptions, for the report."""
        return {}

    def reset(self) -> bool:
        """Makes an idle engine as good as new for another trace; returns whether it can."""
        return False

    def close(self) -> None:
        """Frees what it uses."""
