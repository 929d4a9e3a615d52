"""The paged KV cache: one flat K and one flat V buffer per layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compiled_attn import huge_pages
from compiled_attn.quant import QUANTISED

__all__ = ["PagedKVCache"]


class PagedKVCache(nn.Module):
    """Keys and values of every layer in flat slots, addressed by ``block * block_size + offset``.

    Block 0 is the null block: nothing real is ever stored in it, and all padding points at it.
    The buffers are registered but not persistent, so a model that owns a cache keeps its
    checkpoint. On Linux large buffers of the CPU lie on huge pages, where the system gives them.

    Args:
        num_layers: layers that hold keys (> 0).
        num_blocks: blocks of each layer, the null block included (>= 2).
        block_size: slots in a block (> 0).
        num_kv_heads: key/value heads (> 0).
        head_dim: elements of a key vector, and of a value vector (> 0).
        dtype: element type of both buffers; one of `compiled_attn.quant.QUANTISED` (int8, fp8) adds
            a float32 scale per slot and head to each.
        device: where the buffers live.
        has_value: False for caches whose value is part of the key (MLA); then no V is allocated.

    Raises:
        ValueError: a size is too small.

    Shape:
        - ``key(layer)``, ``value(layer)``: ``[num_blocks * block_size, num_kv_heads, head_dim]``
        - ``key_scale(layer)``, ``value_scale(layer)``: ``[num_blocks * block_size, num_kv_heads]``
          float32, or None where the dtype needs none
        - ``key_blocks(layer)``, ``value_blocks(layer)``: the same storage viewed as
          ``[num_blocks, block_size, num_kv_heads, head_dim]``

    Source: block-paged KV storage as in PagedAttention (Kwon et al., SOSP 2023).
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        has_value: bool = True,
    ) -> None:
        super().__init__()
        _check_sizes(num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.has_value = has_value
        shape = (num_blocks * block_size, num_kv_heads, head_dim)
        self.is_quantised = dtype in QUANTISED
        names = ("key", "value") if has_value else ("key",)
        for layer in range(num_layers):
            for name in names:
                buffer = huge_pages.zeros(shape, dtype, device)
                self.register_buffer(f"{name}_{layer}", buffer, persistent=False)
                if self.is_quantised:
                    scale = huge_pages.zeros(shape[:-1], torch.float32, device)
                    self.register_buffer(f"{name}_scale_{layer}", scale, persistent=False)

    def key(self, layer: int) -> Tensor:
        """Flat key slots of a layer, ``[num_blocks * block_size, num_kv_heads, head_dim]``."""
        return self.get_buffer(f"key_{layer}")

    def value(self, layer: int) -> Tensor:
        """Flat value slots of a layer; for a cache without V the key slots."""
        return self.get_buffer(f"value_{layer}" if self.has_value else f"key_{layer}")

    def key_scale(self, layer: int) -> Tensor | None:
        """What the elements of each key slot and head are multiplied by; None: nothing."""
        return self.get_buffer(f"key_scale_{layer}") if self.is_quantised else None

    def value_scale(self, layer: int) -> Tensor | None:
        """The same for the values; None also where the cache has no V."""
        has_scale = self.is_quantised and self.has_value
        return self.get_buffer(f"value_scale_{layer}") if has_scale else None

    def key_blocks(self, layer: int) -> Tensor:
        """Keys of a layer as ``[num_blocks, block_size, num_kv_heads, head_dim]`` (a view)."""
        return self._by_block(self.key(layer))

    def value_blocks(self, layer: int) -> Tensor:
        """Values of a layer as ``[num_blocks, block_size, num_kv_heads, head_dim]`` (a view)."""
        return self._by_block(self.value(layer))

    def _by_block(self, slots: Tensor) -> Tensor:
        return slots.view(self.num_blocks, self.block_size, *slots.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the buffers."""
        return self.key(0).dtype

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block occupies over all layers, K, V and their scales together."""
        per_head = self.head_dim * self.dtype.itemsize
        if self.is_quantised:
            per_head += torch.float32.itemsize
        per_buffer = self.block_size * self.num_kv_heads * per_head
        return per_buffer * self.num_layers * (2 if self.has_value else 1)

    def extra_repr(self) -> str:
        """Sizes, for `repr`."""
        return (
            f"layers={self.num_layers}, blocks={self.num_blocks}, block_size={self.block_size}, "
            f"kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, dtype={self.dtype}"
        )


def _check_sizes(
    num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
) -> None:
    sizes = {
        "num_layers": (num_layers, 1),
        "num_blocks": (num_blocks, 2),
        "block_size": (block_size, 1),
        "num_kv_heads": (num_kv_heads, 1),
        "head_dim": (head_dim, 1),
    }
    for name, (size, least) in sizes.items():
        if size < least:
            raise ValueError(f"{name} must be at least {least}, got {size}: choose a larger {name}")
