"""One request of a workload, the token ids of its prompt, and scaling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

__all__ = ["HASH_BLOCK", "LONGEST", "Arrival", "fit", "fit_scale", "prompts", "scaled"]

HASH_BLOCK = 512
"""Prompt tokens per prefix id in the published Mooncake traces."""

LONGEST = 10**12
"""Limit of the tokens of a prompt or an output; exact as a float."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload.

    Args:
        arrival_s: seconds since the first request.
        prompt_tokens: length of the prompt, at least 1.
        output_tokens: tokens to generate, at least 1.
        prefix_ids: an id per ``hash_block`` prompt tokens (the last may cover fewer); a common
            prefix of ids is a common prefix of prompts.
        hash_block: prompt tokens per id.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    hash_block: int = HASH_BLOCK


def scaled(arrivals: Sequence[Arrival], scale: float) -> list[Arrival]:
    """Multiply all lengths by ``scale``, rounding up; arrival times stay.

    ``hash_block`` is scaled too, so prompts still share the same ids; ids beyond the end of a
    prompt after rounding are dropped.

    Raises:
        ValueError: ``scale`` is not a positive finite number, or a length exceeds `LONGEST`.
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
    """Round up, with tolerance for floating-point error."""
    return max(1, math.ceil(length * (1 - 1e-9)))


def fit_scale(arrivals: Sequence[Arrival], context: int) -> float:
    """Return the largest of 1, 1/2, 1/4, ... at which every request fits ``context`` tokens.

    Powers of two keep the prefix blocks of the traces whole: 512 tokens become 256, 128, ...

    Raises:
        ValueError: ``context`` is below 2.
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
    """Scale by `fit_scale` so that every request fits ``context`` tokens."""
    return scaled(arrivals, fit_scale(arrivals, context))


def prompts(arrivals: Sequence[Arrival], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Return seeded random token ids in ``[0, vocab_size)`` for each arrival.

    Equal prefix ids give equal tokens; tokens that no id covers are unique to their request.

    Raises:
        ValueError: ``vocab_size`` is below 1 or ``seed`` below 0.
    """
    if vocab_size < 1 or seed < 0:
        raise ValueError(f"expected vocab_size >= 1 and seed >= 0, got {vocab_size} and {seed}")
    blocks: dict[tuple[int, int], list[int]] = {}
    longest = max((arrival.prompt_tokens for arrival in arrivals), default=0)

    def random_tokens(count: int, *source: int) -> list[int]:
        rng = np.random.default_rng([seed, *source])
        return [int(token) for token in rng.integers(vocab_size, size=count)]

    def prompt(index: int, arrival: Arrival) -> list[int]:
        tokens: list[int] = []
        for key in ((prefix_id, arrival.hash_block) for prefix_id in arrival.prefix_ids):
            if key not in blocks:  # a trace may claim blocks longer than any prompt
                blocks[key] = random_tokens(min(arrival.hash_block, longest), 0, key[0])
            tokens += blocks[key]
        del tokens[arrival.prompt_tokens :]
        return tokens + random_tokens(arrival.prompt_tokens - len(tokens), 1, index)

    return [prompt(index, arrival) for index, arrival in enumerate(arrivals)]
