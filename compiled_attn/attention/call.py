"""One call of unified attention: its arguments under the names of `unified_attention`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_attn.attention.metadata import UnifiedMetadata
from compiled_attn.attention.scoring import Scoring
from compiled_attn.ops import AttentionTraits, unit_strides

__all__ = ["UnifiedCall"]


class UnifiedCall(NamedTuple):
    """Arguments of `unified_attention`, under the same names."""

    query: Tensor
    key: Tensor
    value: Tensor | None
    key_cache: Tensor
    value_cache: Tensor | None
    metadata: UnifiedMetadata
    scoring: Scoring
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    value_projection: Tensor | None = None

    @property
    def latent(self) -> int | None:
        """Elements of a key that are its value where there are no values; None: all."""
        return None if self.value_projection is None else self.value_projection.shape[1]

    @property
    def values(self) -> tuple[Tensor, Tensor | None]:
        """The cache of values and its scales: a part of the keys' where there are no values."""
        if self.value_cache is not None:
            return self.value_cache, self.value_scale
        return self.key_cache[..., : self.latent], self.key_scale

    def traits(self) -> AttentionTraits:
        """What decides who can serve the call."""
        query, keys = self.query, self.key_cache
        values = keys if self.value_cache is None else self.value_cache
        slopes = self.scoring.alibi_slopes
        scales = self.key_scale, self.value_scale
        learned = query, self.key, self.value, keys, values, *scales, slopes, self.scoring.sinks
        return AttentionTraits(
            query.device.type,
            query.dtype,
            (keys.dtype, values.dtype),
            query.shape[-1],
            softcap=self.scoring.softcap is not None,
            alibi=0 if slopes is None else 1,
            gradients=torch.is_grad_enabled()
            and any(each is not None and each.requires_grad for each in learned),
            by_request=self.metadata.by_request is not None,
            by_parts=self.metadata.has_parts,
            unit_stride=unit_strides(keys, values),
        )
