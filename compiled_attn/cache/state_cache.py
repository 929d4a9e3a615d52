"""Recurrent states of a model's layers: one slot of fixed size for each request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from compiled_attn.arguments import whole
from compiled_attn.cache import huge_pages

__all__ = ["StateCache", "StateShape"]

_KINDS = ("conv", "delta", "ssd", "scan")


class StateShape(NamedTuple):
    """What one state of a layer stores of a request.

    Args:
        kind: "conv" (the last inputs of a causal convolution), "delta" (a gated delta net), "ssd"
            (Mamba 2) or "scan" (Mamba).
        shape: sizes of one slot.
        dtype: element type.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one slot."""
        return math.prod(self.shape) * self.dtype.itemsize


class StateCache(nn.Module):
    """Recurrent states of every layer in slots, of which each running request has one.

    Slot 0 is the null slot: rows of padding name it, and no step reads or writes it. A slot says
    nothing about which tokens its states are for: see `StatePool`. Buffers ``state_{layer}_{n}``
    are registered but not persistent.

    Args:
        layers: states of each layer in the order in which it uses them; ``()``: it has none.
        slots: slots of each state including the null slot (>= 2).
        device: device of the buffers.

    Raises:
        ValueError: there are fewer slots, no layer has a state, or a kind or size is wrong.

    Shape:
        - ``of_layer(layer)[n]``: ``[slots, *layers[layer][n].shape]``
    """

    def __init__(
        self,
        layers: Sequence[Sequence[StateShape]],
        slots: int,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.slots = whole("slots (one of them is the null slot)", slots, 2)
        self.shapes = tuple(tuple(each) for each in layers)
        _check_shapes(self.shapes)
        for layer, shapes in enumerate(self.shapes):
            for n, shape in enumerate(shapes):
                buffer = huge_pages.zeros((slots, *shape.shape), shape.dtype, device)
                self.register_buffer(f"state_{layer}_{n}", buffer, persistent=False)

    def of_layer(self, layer: int) -> tuple[Tensor, ...]:
        """Returns the states of a layer, each ``[slots, *shape]``."""
        return tuple(self.get_buffer(f"state_{layer}_{n}") for n in range(len(self.shapes[layer])))

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot over all layers."""
        return sum(shape.nbytes for shapes in self.shapes for shape in shapes)

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copies all states of slots, ``(source, destination)`` pairs one after another.

        Raises:
            ValueError: a slot is the null slot, or there is none of that number.
        """
        pairs = [*pairs]
        for slot in (slot for pair in pairs for slot in pair):
            if not 0 < slot < self.slots:
                raise ValueError(f"expected a slot in 1..{self.slots - 1}, got {slot}")
        for state in self.buffers():
            for source, destination in pairs:
                state[destination].copy_(state[source])

    def fill_(self, value: float, slots: Sequence[int] | None = None) -> None:
        """Sets every element of some slots; None: of all, the null slot included."""
        for state in self.buffers():
            if slots is None:
                state.fill_(value)
            for slot in slots or ():
                state[slot].fill_(value)

    def extra_repr(self) -> str:
        """Sizes, for ``repr``."""
        return f"slots={self.slots}, bytes_per_slot={self.bytes_per_slot}"


def _check_shapes(layers: tuple[tuple[StateShape, ...], ...]) -> None:
    if not any(layers):
        raise ValueError("layers: expected a state in one of them, got none: use no StateCache")
    for layer, shape in ((n, shape) for n, shapes in enumerate(layers) for shape in shapes):
        if shape.kind not in _KINDS or min(shape.shape, default=0) < 1:
            raise ValueError(
                f"layers[{layer}]: expected a kind of {_KINDS} and sizes of at least 1, got {shape}"
            )
