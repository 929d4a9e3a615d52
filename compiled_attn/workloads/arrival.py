"""One request of a demand, and demands made smaller or larger."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["HASH_BLOCK", "LONGEST", "Arrival", "fit", "fit_scale", "scaled"]

HASH_BLOCK = 512
"""Prompt tokens that one prefix id of the published Mooncake traces covers."""

LONGEST = 10**12
"""Tokens of a prompt or an output at most: far beyond any model, and exact as a float."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a demand.

    Args:
        arrival_s: seconds since the first request.
        prompt_tokens: length of the prompt, at least 1.
        output_tokens: tokens to generate, at least 1.
        prefix_ids: one id for each ``hash_block`` prompt tokens (the last may cover fewer);
            requests whose ids begin alike have prompts that begin alike.
        hash_block: prompt tokens that one id covers.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    hash_block: int = HASH_BLOCK


def scaled(arrivals: Sequence[Arrival], scale: float) -> list[Arrival]:
    """Multiply all lengths by ``scale``.

    Every length ``n``, ``hash_block`` too, becomes ``ceil(n * scale)``. So no length falls below 1,
    prompts that shared ``k`` ids still do, and the ids cover what they covered; an id that rounding
    leaves behind the end of its prompt is dropped. Times stay.

    Raises:
        ValueError: ``scale`` is not a positive finite number, or a prompt or an output becomes
            longer than :data:`LONGEST`.
    """
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be a positive number, got {scale!r}")

    longest = max((max(a.prompt_tokens, a.output_tokens) for a in arrivals), default=1)
    if longest * scale > LONGEST:
        raise ValueError(
            f"expected lengths of at most {LONGEST:,} tokens, got {longest:,} scaled by {scale:g}: "
            "choose a smaller scale"
        )

    def stretch(arrival: Arrival) -> Arrival:
        prompt_tokens = _ceil(arrival.prompt_tokens * scale)
        hash_block = _ceil(arrival.hash_block * scale)
        return replace(
            arrival,
            prompt_tokens=prompt_tokens,
            output_tokens=_ceil(arrival.output_tokens * scale),
            prefix_ids=arrival.prefix_ids[: math.ceil(prompt_tokens / hash_block)],
            hash_block=hash_block,
        )

    return [stretch(arrival) for arrival in arrivals]


def _ceil(length: float) -> int:
    """Round up, but forgive what binary fractions add to a whole number."""
    return max(1, math.ceil(length * (1 - 1e-9)))


def fit_scale(arrivals: Sequence[Arrival], context: int) -> float:
    """Largest of 1, 1/2, 1/4, ... at which every prompt and its output fit ``context`` tokens.

    Powers of two keep the prefix blocks of the traces whole: 512 tokens become 256, 128, ...

    Raises:
        ValueError: ``context`` is below 2, the least that a prompt and an output token take.
    """
    if context < 2:
        raise ValueError(f"context must be at least 2 tokens, got {context}")
    scale = 1.0
    while any(
        _ceil(a.prompt_tokens * scale) + _ceil(a.output_tokens * scale) > context for a in arrivals
    ):
        scale /= 2
    return scale


def fit(arrivals: Sequence[Arrival], context: int) -> list[Arrival]:
    """Shrink a demand by :func:`fit_scale` so that every request fits ``context`` tokens."""
    return scaled(arrivals, fit_scale(arrivals, context))
