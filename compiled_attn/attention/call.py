"""The arguments of one call of unified attention, checked, without what follows the attention."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from compiled_attn.attention.metadata import UnifiedMetadata

__all__ = ["UnifiedCall"]


class UnifiedCall(NamedTuple):
    """Arguments of `unified_attention`, under the same names.

    ``latent`` elements of a key are its value where there are no values; None: all.
    """

    query: Tensor
    key: Tensor
    value: Tensor | None
    key_cache: Tensor
    value_cache: Tensor | None
    scale: float
    metadata: UnifiedMetadata
    sliding_window: int | None
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    key_scale: Tensor | None
    value_scale: Tensor | None
    latent: int | None

    @property
    def values(self) -> tuple[Tensor, Tensor | None]:
        """The cache of values and its scales: a part of the keys' where there are no values."""
        if self.value_cache is not None:
            return self.value_cache, self.value_scale
        return self.key_cache[..., : self.latent], self.key_scale
