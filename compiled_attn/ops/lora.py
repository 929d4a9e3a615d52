"""The op ``add_lora``: adds to each row of a linear layer the change of that row's own adapter."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["MAX_RANK", "fake", "reference"]

MAX_RANK = 1024
"""Of an adapter."""


def reference(
    out: Tensor,
    input: Tensor,
    a: Tensor,
    b: Tensor,
    scale: Tensor,
    ranks: Tensor,
    slots: Tensor,
) -> Tensor:
    """Computes ``out + scale * (input @ a.T) @ b`` by row in float32, rounded once.

    A row's bits depend on nothing but the row and its adapter; those of slot 0 are ``out``'s.

    Args:
        out: ``[T, N]`` of the layer, bfloat16 or float32, dense.
        input: ``[T, K]`` of the layer in the same dtype, rows of any stride.
        a: ``[S, R, K]`` in the same dtype.
        b: ``[S, R, N]`` in the same dtype, transposed from how peft stores it.
        scale: ``[S]`` float32.
        ranks: ``[S]`` int32, how many of the R ranks a slot uses; 0: it does not change the layer.
        slots: int32 ``[T]`` or longer, the slot of each row; 0: none.

    Returns:
        ``[T, N]``, new.
    """
    result = out.clone()
    of_row = slots[: len(out)]
    for slot in of_row.unique().tolist():
        rank = int(ranks[slot])
        if slot == 0 or rank == 0:
            continue
        rows = (of_row == slot).nonzero().squeeze(1)
        hidden = input[rows].float() @ a[slot, :rank].float().T
        change = scale[slot] * (hidden @ b[slot, :rank].float())
        result[rows] = (out[rows].float() + change).to(out.dtype)
    return result


def fake(out: Tensor, *_: Tensor) -> Tensor:
    """The result's shape."""
    return torch.empty_like(out)
