"""The last layer of a step: all tokens leave their keys and values, few go on.

What else the last layer makes of a token is for its own logits, and of a chunk of a prompt those of
one token are wanted. So the layer runs twice: with all tokens until their keys and values are
written, then with the rows that are wanted, each a request of one token. With N layers that spares
a prefill nearly an N-th of its arithmetic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from compiled_attn.hf.attention import PagedStep, Written

__all__ = ["in_two_passes"]

Forward = Callable[..., Any]


def in_two_passes(forward: Forward, plain: Forward) -> Forward:
    """A forward of the last layer: ``forward`` for a step that does not say which rows it wants.

    Args:
        forward: calls the layer.
        plain: the same without a region of its own, which an exception cannot leave.
    """

    def in_two(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        step: PagedStep | None = kwargs.get("paged")
        if step is None or step.wanted is None:
            return forward(layer, *args, **kwargs)
        with contextlib.suppress(Written):
            plain(layer, *args, **{**kwargs, "paged": replace(step, only_writes=True)})
        tokens, (rows, few) = len(step.slots), step.wanted
        args = tuple(_chosen(value, rows, tokens) for value in args)
        kwargs = {name: _chosen(value, rows, tokens) for name, value in kwargs.items()}
        return plain(layer, *args, **{**kwargs, "paged": few})

    return in_two


def _chosen(value: Any, rows: Tensor, tokens: int) -> Any:
    """Of what has a row for each token, ``[1, tokens, ...]``, the chosen ones."""
    if isinstance(value, tuple | list):
        return type(value)(_chosen(each, rows, tokens) for each in value)
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == (1, tokens):
        return value[:, rows]
    return value
