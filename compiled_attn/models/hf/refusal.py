"""Errors for models that cannot be served, and a temporary switch of their attention."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from compiled_attn.errors import ModelRefused

__all__ = ["failure", "plain_attention", "refusal"]


def refusal(model: nn.Module, got: str) -> ModelRefused:
    """Returns the error for a model that has ``got``, which cannot be served."""
    return ModelRefused(
        "expected a model whose layers all attend once a step through transformers' "
        f"AttentionInterface, or keep a known state, got a {type(model).__name__} {got}: "
        "it cannot run on the paged cache"
    )


def failure(model: nn.Module, where: str, error: Exception) -> ModelRefused:
    """Returns the error for a model that fails ``where``, with the first line of its own error."""
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return refusal(model, f"that fails {where} ({reason})")


@contextlib.contextmanager
def plain_attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Context with another attention implementation and eval mode."""
    attention, training = model.config._attn_implementation, model.training
    model.eval()
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(attention)
        model.train(training)
