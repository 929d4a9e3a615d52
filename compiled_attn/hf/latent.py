"""Multi-head latent attention: the cache keeps what a token's keys and values are made of.

The modules of transformers' DeepSeek family expand the latents ``c [R]`` and the rotated key ``r``
of a token to keys ``[W_k c, r]`` and values ``W_v c`` of every head, in a method of their own,
``expand_kv``. It is replaced by one that does not expand; the scores then take ``(W_k^T q_nope) c +
q_rope r``, and ``W_v`` is applied to the sum over tokens. Source: DeepSeek-V2 (2024), 2.1.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from compiled_attn.cache.kv_cache import KVShape
from compiled_attn.hf.names import ATTENTION_NAME

__all__ = ["absorb", "keep_latents", "latent_shape", "reads"]


def latent_shape(module: Any) -> KVShape | None:
    """What the cache keeps of a token, ``R`` latents and the rotated key; None: no such module."""
    up = getattr(module, "kv_b_proj", None)
    if not hasattr(type(module), "expand_kv") or type(up) is not nn.Linear:
        return None
    if getattr(up, "bias", None) is not None:
        return None
    rank, rotated = up.in_features, int(module.qk_rope_head_dim)
    return KVShape(1, rank + rotated, None)


def keep_latents(module: Any) -> None:
    """Lets a module hand its latents to our attention; for any other it still expands them."""
    module.expand_kv = MethodType(_latents, module)


def _latents(module: Any, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """In place of ``expand_kv``: ``[1, 1, T, R]`` and ``[1, 1, T, rope]`` -> the key, twice."""
    if module.config._attn_implementation != ATTENTION_NAME:
        expanded: tuple[Tensor, Tensor] = type(module).expand_kv(module, latent, rotated)
        return expanded
    key = torch.cat((latent, rotated), dim=-1)
    return key, key


def reads(module: Any) -> Tensor:
    """The weight that `absorb` takes apart, and which must lie as it was made."""
    weight: Tensor = module.kv_b_proj.weight
    return weight


def absorb(module: Any, query: Tensor) -> tuple[Tensor, Tensor]:
    """The query in the space of the latents, and what takes the result back.

    Args:
        module: of latent attention, with H heads.
        query: ``[1, H, T, nope + rope]``.

    Returns:
        ``[1, H, T, R + rope]``; the value projection ``[H, R, Dv]``.
    """
    nope, rope = query.split((module.qk_nope_head_dim, module.qk_rope_head_dim), dim=-1)
    weight = reads(module).unflatten(0, (query.shape[1], -1))
    key, value = weight.split((module.qk_nope_head_dim, module.v_head_dim), dim=1)
    return torch.cat((torch.matmul(nope, key), rope), dim=-1), value.transpose(1, 2)
