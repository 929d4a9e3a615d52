"""The settings of the draws of a step, as tensors: a row each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_attn.engine.sampling import SamplingParams

__all__ = ["DrawRows"]


class DrawRows(NamedTuple):
    """The settings of the op ``drawn_tokens``, ``[R]`` each, see `ops.drawn_tokens.drawn`."""

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
        uniform: NDArray[np.float64],
        rows: int,
        vocab: int,
    ) -> DrawRows:
        """Those of some rows among others whose most likely token is taken.

        Args:
            at: n >= 1 of the rows.
            params: n settings, of which those count that leave the logits as they are.
            uniform: ``[n]`` numbers in [0, 1).
            rows: how many there are.
            vocab: tokens of a row.
        """
        drawn = cls.padding(rows)
        drawn.temperature[at] = _doubles([each.temperature for each in params])
        drawn.top_k[at] = torch.tensor([min(each.top_k or vocab, vocab) for each in params])
        drawn.top_p[at] = _doubles([each.top_p for each in params])
        drawn.min_p[at] = _doubles([each.min_p for each in params])
        drawn.uniform[at] = torch.from_numpy(np.ascontiguousarray(uniform))
        return drawn

    @classmethod
    def padding(cls, rows: int) -> DrawRows:
        """Rows whose most likely token is taken."""
        ones, zeros = (torch.full((rows,), n, dtype=torch.float64) for n in (1.0, 0.0))
        return cls(zeros, ones.long(), ones, zeros.clone(), zeros.clone())


def _doubles(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
