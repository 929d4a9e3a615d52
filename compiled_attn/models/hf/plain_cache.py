"""A cache for plain ``generate`` that rounds keys and values like an 8-bit paged cache.

It shares no code with the caches and kernels that serve, as they are compared with it.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from compiled_attn.models.hf.attention import latent_shape
from compiled_attn.models.hf.states.rewrite import uses

__all__ = ["fresh_cache"]

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def fresh_cache(model: nn.Module, dtype: torch.dtype | None) -> dict[str, Any]:
    """Returns the arguments of a forward or of ``generate`` that pass a fresh cache.

    ``dtype``: int8 or float8_e4m3fn; None: the default cache of transformers.
    """
    if dtype is None:
        return {}
    found: list[Any] = [m for m in model.modules() if latent_shape(m) is not None]
    # With layers that keep a state the cache has layers of two kinds, which only it can tell.
    has_states = any(uses(type(module).forward) for module in model.modules())
    config = model.config if has_states else None
    return {"past_key_values": _Rounded(dtype, {module.layer_idx for module in found}, config)}


class _Rounded(DynamicCache):  # type: ignore[misc]  # Any: mypy does not read transformers
    """Rounds rows ``[..., D]`` to ``element * scale``, with the scale of the row's maximum.

    Layers in ``latent`` store latents and rotated keys as one row.
    """

    def __init__(self, dtype: torch.dtype, latent: Container[int], config: Any) -> None:
        super().__init__(config=config)
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
    stored = scaled if dtype.is_floating_point else scaled.round()
    return (stored.to(dtype).to(wide.dtype) * scale).to(rows.dtype)
