"""Seeded demands with the percentiles of public traces, to serve without a trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from compiled_attn.workloads.arrival import HASH_BLOCK, Arrival

__all__ = ["KINDS", "synthetic"]


class _Lengths(NamedTuple):
    """Least, p50, p90, p99 and greatest length in tokens."""

    least: int
    p50: int
    p90: int
    p99: int
    most: int


class _Kind(NamedTuple):
    prompt: _Lengths
    output: _Lengths
    requests_per_s: float
    follow_ups: float = 0.0
    """Share of requests that begin like an earlier one."""


_KINDS = {
    "chat": _Kind(
        prompt=_Lengths(8, 1020, 2734, 4142, 14050),
        output=_Lengths(12, 129, 424, 601, 1000),
        requests_per_s=5.5,
    ),
    "code": _Kind(
        prompt=_Lengths(7, 1469, 5186, 7436, 7437),
        output=_Lengths(6, 13, 55, 249, 1899),
        requests_per_s=2.6,
    ),
    "rag": _Kind(
        prompt=_Lengths(892, 6909, 27367, 85399, 126195),
        output=_Lengths(1, 350, 597, 1115, 2000),
        requests_per_s=3.3,
        follow_ups=0.95,
    ),
}
KINDS = tuple(_KINDS)
"""The demands that :func:`synthetic` knows."""

_Z = (-3.0902, 0.0, 1.2816, 2.3263, 3.7190)
"""Standard normal quantiles at .001, .5, .9, .99 and .9999, where the five `_Lengths` are met."""


def synthetic(
    kind: str, requests: int, seed: int = 0, *, follow_ups: float | None = None
) -> list[Arrival]:
    """Draw a demand whose lengths have the percentiles of a public trace.

    ``chat`` and ``code`` follow the Azure LLM inference traces of 2023 (conversation, code),
    ``rag`` the conversation trace of Mooncake: long prompts, of whose 512-token blocks about a
    third were seen before. Lengths are lognormal between the known percentiles (their logarithm is
    linear in the normal quantile); arrivals are a Poisson process. A longer demand of one kind and
    seed begins with the shorter one.

    Args:
        kind: one of `KINDS`.
        requests: how many.
        seed: of all that is drawn.
        follow_ups: share of requests that begin like an earlier one; None: that of the kind.

    Raises:
        ValueError: unknown ``kind``, ``requests`` below 1, ``seed`` below 0, or ``follow_ups``
            outside 0..1.
    """
    if kind not in _KINDS:
        raise ValueError(f"unknown demand {kind!r}; expected one of {', '.join(KINDS)}")
    if requests < 1:
        raise ValueError(f"requests must be at least 1, got {requests}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    if follow_ups is not None and not 0 <= follow_ups <= 1:
        raise ValueError(f"follow_ups must be in 0..1, got {follow_ups}")
    spec = _KINDS[kind]
    share = spec.follow_ups if follow_ups is None else follow_ups
    streams = [np.random.default_rng([seed, stream]) for stream in range(4)]
    gaps = streams[0].exponential(1 / spec.requests_per_s, requests)
    gaps[0] = 0.0
    prompt = _draw(spec.prompt, requests, streams[1])
    output = _draw(spec.output, requests, streams[2])
    prefixes = _prefixes(prompt, share, streams[3])
    return [
        Arrival(round(at, 3), prompt_tokens, output_tokens, ids)
        for at, prompt_tokens, output_tokens, ids in zip(
            gaps.cumsum().tolist(), prompt, output, prefixes, strict=True
        )
    ]


def _draw(lengths: _Lengths, count: int, rng: np.random.Generator) -> list[int]:
    logs = np.interp(rng.standard_normal(count), _Z, np.log(lengths))
    return [round(length) for length in np.exp(logs).tolist()]


def _prefixes(
    prompt_tokens: Sequence[int], follow_ups: float, rng: np.random.Generator
) -> list[tuple[int, ...]]:
    """Ids of each prompt: 0 first for all, then those of an earlier prompt up to a random place."""
    if not follow_ups:
        return [()] * len(prompt_tokens)
    chains: list[tuple[int, ...]] = []
    unused = 1
    for tokens in prompt_tokens:
        blocks = math.ceil(tokens / HASH_BLOCK)
        chain: tuple[int, ...] = (0,)
        follows, which, place = rng.random(3)
        if chains and follows < follow_ups:
            earlier = chains[int(which * len(chains))][:blocks]
            chain = earlier[: math.ceil(math.sqrt(place) * len(earlier)) or 1]
        fresh = blocks - len(chain)
        chains.append(chain + tuple(range(unused, unused + fresh)))
        unused += fresh
    return chains
