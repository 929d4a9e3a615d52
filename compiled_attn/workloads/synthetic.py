"""Seeded synthetic workloads with the percentiles of public traces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from compiled_attn.workloads.arrival import HASH_BLOCK, Arrival

__all__ = ["KINDS", "synthetic"]


class _Lengths(NamedTuple):
    """Minimum, percentiles and maximum of a length in tokens."""

    min: int
    p50: int
    p90: int
    p99: int
    max: int


class _Kind(NamedTuple):
    prompt: _Lengths
    output: _Lengths
    requests_per_s: float
    follow_ups: float = 0.0  # share of requests with the prefix of an earlier one


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
"""The workloads of `synthetic`."""

_Z = (-3.0902, 0.0, 1.2816, 2.3263, 3.7190)
"""Standard normal quantiles at .001, .5, .9, .99 and .9999, those of the five `_Lengths`."""


def synthetic(kind: str, requests: int, seed: int = 0) -> list[Arrival]:
    """Generate a workload whose lengths have the percentiles of a public trace.

    ``chat`` and ``code`` follow the Azure LLM inference traces of 2023 (conversation, code),
    ``rag`` the conversation trace of Mooncake: long prompts, a third of whose 512-token blocks
    occurred before. Lengths are lognormal between the known percentiles; arrivals are a Poisson
    process. A longer workload of the same kind and seed starts with the shorter one.

    Args:
        kind: one of `KINDS`.
        requests: number of requests.
        seed: of the random numbers.

    Raises:
        ValueError: unknown ``kind``, ``requests`` below 1, or ``seed`` below 0.
    """
    if kind not in _KINDS:
        raise ValueError(f"unknown demand {kind!r}; expected one of {', '.join(KINDS)}")
    if requests < 1:
        raise ValueError(f"requests must be at least 1, got {requests}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    spec = _KINDS[kind]
    streams = [np.random.default_rng([seed, stream]) for stream in range(4)]
    gaps = streams[0].exponential(1 / spec.requests_per_s, requests)
    gaps[0] = 0.0
    prompt = _lengths(spec.prompt, requests, streams[1])
    output = _lengths(spec.output, requests, streams[2])
    prefixes = _prefixes(prompt, spec.follow_ups, streams[3])
    return [
        Arrival(round(at, 3), prompt_tokens, output_tokens, ids)
        for at, prompt_tokens, output_tokens, ids in zip(
            gaps.cumsum().tolist(), prompt, output, prefixes, strict=True
        )
    ]


def _lengths(lengths: _Lengths, count: int, rng: np.random.Generator) -> list[int]:
    logs = np.interp(rng.standard_normal(count), _Z, np.log(lengths))
    return [round(length) for length in np.exp(logs).tolist()]


def _prefixes(
    prompt_tokens: Sequence[int], follow_ups: float, rng: np.random.Generator
) -> list[tuple[int, ...]]:
    """Ids of each prompt: 0 first, then those of an earlier prompt up to a random position."""
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
