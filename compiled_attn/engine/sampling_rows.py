"""Sampling settings of a step as tensors, with the uniform random number of each row.

Philox, which needs no state: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3",
SC 2011; Philox4x64 with 10 rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_attn.engine.sampling import SamplingParams

__all__ = ["SamplingRows", "uniforms"]

Words = NDArray[np.uint64]

_FACTORS = (np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157))
_KEY_STEPS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B))
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)


def uniforms(seeds: Sequence[int], steps: Sequence[int]) -> NDArray[np.float64]:
    """Returns for each seed its number of a step, in [0, 1): bit for bit that of
    ``numpy.random.Generator(numpy.random.Philox(key=seed, counter=step)).random()``.

    Args:
        seeds: ``[n]`` in 0..2**64 - 1.
        steps: ``[n]``, from 0 on.
    """
    key = np.array(seeds, np.uint64), np.zeros(len(seeds), np.uint64)
    first = np.array(steps, np.uint64) + np.uint64(1)  # numpy increments before it samples
    words = first, *(np.zeros(len(seeds), np.uint64) for _ in range(3))
    for number in range(10):
        if number:
            key = key[0] + _KEY_STEPS[0], key[1] + _KEY_STEPS[1]
        high0, low0 = _product(words[0], _FACTORS[0])
        high1, low1 = _product(words[2], _FACTORS[1])
        words = high1 ^ words[1] ^ key[0], low1, high0 ^ words[3] ^ key[1], low0
    return (words[0] >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _product(a: Words, b: np.uint64) -> tuple[Words, Words]:
    """The high and the low 64 bits."""
    a_high, a_low, b_high, b_low = a >> _HALF, a & _LOW, b >> _HALF, b & _LOW
    middle = a_high * b_low + (a_low * b_low >> _HALF)
    carry = a_low * b_high + (middle & _LOW)
    return a_high * b_high + (middle >> _HALF) + (carry >> _HALF), a * b


class SamplingRows(NamedTuple):
    """The settings of the op ``sample_tokens``, ``[R]`` each, see `ops.sampling.sample`."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor

    @classmethod
    def of(
        cls,
        at: Sequence[int],
        params: Sequence[SamplingParams],
        steps: Sequence[int],
        rows: int,
        vocab: int,
    ) -> SamplingRows:
        """Makes the settings of some rows; the others take their most likely token.

        Args:
            at: n >= 1 of the rows.
            params: n settings; those that change the logits are ignored.
            steps: n, how many tokens each request has generated: the counters of the generator.
        """
        settings = cls.padding(rows)
        settings.temperature[at] = _doubles([each.temperature for each in params])
        settings.top_k[at] = torch.tensor([min(each.top_k or vocab, vocab) for each in params])
        settings.top_p[at] = _doubles([each.top_p for each in params])
        settings.min_p[at] = _doubles([each.min_p for each in params])
        uniform = uniforms([each.seed or 0 for each in params], steps)
        settings.uniform[at] = torch.from_numpy(uniform)
        return settings

    @classmethod
    def padding(cls, rows: int) -> SamplingRows:
        """Makes the settings of rows that take their most likely token."""
        ones, zeros = (torch.full((rows,), n, dtype=torch.float64) for n in (1.0, 0.0))
        return cls(zeros, ones.long(), ones, zeros.clone(), zeros.clone())


def _doubles(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
