"""Marks on example inputs that make Dynamo take some of their sizes for symbols."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from graphs.capture.inputs import Input

__all__ = ["marked"]

_MARKS = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")


@contextmanager
def marked(examples: Sequence[Input], dims: Sequence[Sequence[int]]) -> Iterator[None]:
    """Let a compile inside take these dimensions of each example for symbols.

    A size that the callable fixes stays fixed, and is a guard. Equal sizes get symbols of their
    own: that they are equal here says nothing of other buckets.
    """
    both = [(x, own) for x, own in zip(examples, dims, strict=False) if isinstance(x, Tensor)]
    tensors = [(tensor, own) for tensor, own in both if own]
    symbols: Any = importlib.import_module("torch.fx.experimental._config")
    with symbols.patch(use_duck_shape=not tensors and symbols.use_duck_shape):
        try:
            for tensor, own in tensors:
                torch._dynamo.maybe_mark_dynamic(tensor, [*own])
            yield
        finally:
            for tensor, _ in tensors:
                for mark in _MARKS:
                    vars(tensor).pop(mark, None)
