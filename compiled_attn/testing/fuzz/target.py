"""The base class of targets: adapters of engines for the fuzzer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from compiled_attn.testing.fuzz.trace import Settings

__all__ = ["Reference", "Refused", "Target"]


class Refused(Exception):
    """Raised by `Target.submit` if the engine rejects a request; not a failure."""


class Reference(Protocol):
    """The expected result: the target's model without an engine, one request at a time."""

    def logits(self, texts: Sequence[Sequence[int]]) -> list[NDArray[np.float64]]:
        """Returns logits ``[len(text), vocab]`` of each text, as exact as possible."""
        ...

    def rounding(self, text: Sequence[int]) -> float:
        """Returns by how much the target's logits of a text may differ from `logits`."""
        ...

    def choices(
        self, logits: NDArray[np.float64], seed: int | None, step: int, error: float
    ) -> Sequence[int] | NDArray[np.int64]:
        """Returns the token for a row of logits, then those for rows within ``error`` of it.

        ``seed`` is that of `Operation`; ``step`` counts the generated tokens before.
        """
        ...


class Target:
    """Adapter of an engine: override `submit` and `step`, and methods of what else it supports.

    Attributes:
        reference: computes the expected tokens; set by the subclass.
        supports: operations beyond submit, share and step ("abort", "fork", "preempt",
            "defragment", "draft"), and options of requests ("salt", "sample").
        block_sizes, families: values for the settings of a trace.
        longest: maximum tokens of a request.
        same_settings: traces in a row with the same settings, for engines that start slowly.
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
        """Queues ``count`` continuations of a prompt, with ids from ``request`` on.

        Each yields exactly ``new_tokens`` tokens (ignore end-of-sequence tokens). Raises `Refused`
        if the engine rejects them.
        """
        raise NotImplementedError

    def reference_of(self, request: int) -> Reference:
        """Returns the reference of a request's tokens."""
        return self.reference

    def step(self) -> Mapping[int, Sequence[int]]:
        """Runs a step; returns the new tokens of each request."""
        raise NotImplementedError

    def abort(self, request: int, count: int) -> None:
        """Aborts the ``count`` continuations of a request; at least one has not finished."""

    def preempt(self) -> None:
        """Preempts a running request, if there is one."""

    def defragment(self) -> None:
        """Compacts the cache by moving blocks."""

    def draft(self, count: int) -> None:
        """Sets the number of draft tokens per step (speculative decoding)."""

    def check(self, is_idle: bool) -> str:
        """Checks invariants between steps; returns a description of a violation, or "".

        ``is_idle``: all requests have finished, so no block may be in use.
        """
        return ""

    def counts(self) -> Mapping[str, int]:
        """Returns counters of the engine for the report, such as preemptions."""
        return {}

    def reset(self) -> bool:
        """Resets an idle engine for another trace; returns False if it cannot."""
        return False

    def close(self) -> None:
        """Releases the engine."""
