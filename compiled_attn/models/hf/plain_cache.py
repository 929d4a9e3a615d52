"""A cache for plain ``generate`` that rounds keys and values like an 8-bit paged cache.

It shares no code with the caches and kernels that serve, as they are compared with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from compiled_attn.models.hf.attention import latent_shape

__all__ = ["PlainCaches"]

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@dataclass(frozen=True, slots=True)
class PlainCaches:
    """Creates a fresh cache for each plain generation.

    Args:
        dtype: int8 or float8_e4m3fn; None: the default cache of transformers.
        latent: layers that store latents and rotated keys as one row.
    """

    dtype: torch.dtype | None = None
    latent: frozenset[int] = frozenset()

    @staticmethod
    def of(model: PreTrainedModel, dtype: torch.dtype | None) -> PlainCaches:
        """Returns the caches for a model."""
        found: list[Any] = [m for m in model.modules() if latent_shape(m) is not None]
        return PlainCaches(dtype, frozenset(module.layer_idx for module in found))

    def fresh(self) -> dict[str, Any]:
        """Returns the arguments of a forward or of ``generate`` that pass a fresh cache."""
        return {} if self.dtype is None else {"past_key_values": _Rounded(self.dtype, self.latent)}


class _Rounded(DynamicCache):  # type: ignore[misc]  # Any: mypy does not read transformers
    """Rounds rows ``[..., D]`` to ``code * scale``; the largest element has the largest code."""

    def __init__(self, dtype: torch.dtype, latent: frozenset[int]) -> None:
        super().__init__()
        self._dtype, self._latent = dtype, latent

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores ``[1, H, T, D]`` of a layer; returns all that is stored."""
        if layer_idx in self._latent:
            sizes = key_states.shape[-1], value_states.shape[-1]
            whole = _rounded(torch.cat((key_states, value_states), -1), self._dtype)
            key_states, value_states = whole.split(sizes, -1)
        else:
            key_states = _rounded(key_states, self._dtype)
            value_states = _rounded(value_states, self._dtype)
        both: tuple[Tensor, Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        return both


def _rounded(rows: Tensor, dtype: torch.dtype) -> Tensor:
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    scale = wide.abs().amax(-1, keepdim=True) / _LARGEST[dtype]
    scaled = wide / scale.where(scale > 0, 1)  # a row of zeros
    codes = scaled if dtype.is_floating_point else scaled.round()
    return (codes.to(dtype).to(wide.dtype) * scale).to(rows.dtype)
