"""The token ids of a demand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compiled_attn.workloads.arrival import Arrival

__all__ = ["prompts"]


def prompts(arrivals: Sequence[Arrival], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Seeded random token ids in ``[0, vocab_size)``: a list of ``prompt_tokens`` for each arrival.

    Equal prefix ids give equal tokens wherever they appear in the demand; tokens that no id covers
    belong to their request alone.

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
            if key not in blocks:
                # No more than any prompt has room for, whatever the trace says a block is.
                blocks[key] = random_tokens(min(arrival.hash_block, longest), 0, key[0])
            tokens += blocks[key]
        del tokens[arrival.prompt_tokens :]
        return tokens + random_tokens(arrival.prompt_tokens - len(tokens), 1, index)

    return [prompt(index, arrival) for index, arrival in enumerate(arrivals)]
