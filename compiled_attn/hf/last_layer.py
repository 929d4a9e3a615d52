"""The last layer of a step: all tokens leave their keys and values, few go on.

What else the last layer makes of a token is for its own logits, and of a chunk of a prompt those of
one token are wanted. So the layer runs twice: with all tokens until their keys and values are
written, then with the rows that are wanted, each a request of one token. With N layers that spares
a prefill nearly an N-th of its arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from compiled_attn.hf.attention import PagedStep, Written

__all__ = ["in_two_passes"]

Forward = Callable[..., Any]

# What layers are given of each token, beside their first argument. Whatever else has such a shape,
# and be it by chance, stays whole: then the trial of the model fails, or it does not matter.
_BY_TOKEN = ("hidden_states", "position_ids", "position_embeddings")


def in_two_passes(forward: Forward) -> Forward:
    """A forward of the last layer: ``forward`` once, or twice if the step says which rows it wants.

    The passes are not regions: an exception cannot leave one.
    """

    def in_two(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        step: PagedStep | None = kwargs.get("paged")
        if step is None or step.wanted is None:
            return forward(layer, *args, **kwargs)
        try:  # not every Dynamo traces contextlib.suppress
            writing = replace(step, only_writes=True, regions=None, packed=None)
            forward(layer, *args, **{**kwargs, "paged": writing})
        except Written:
            pass
        rows, few = step.wanted
        args = tuple(_of_rows(value, rows, step.tokens) for value in args[:1]) + args[1:]
        for name in _BY_TOKEN:
            if name in kwargs:
                kwargs[name] = _of_rows(kwargs[name], rows, step.tokens)
        return forward(layer, *args, **{**kwargs, "paged": few})

    return in_two


def _of_rows(value: Any, rows: Tensor, tokens: int) -> Any:
    """Of what has a row for each token, ``[1, tokens, ...]``, those rows."""
    if isinstance(value, tuple | list):
        return type(value)(_of_rows(each, rows, tokens) for each in value)
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == (1, tokens):
        return value[:, rows]
    return value
