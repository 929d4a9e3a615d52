"""The paged KV cache: one flat K and one flat V buffer per layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from compiled_attn.arguments import whole
from compiled_attn.cache import huge_pages
from compiled_attn.cache.quantisation import QUANTISED, dequantise, quantise
from compiled_attn.cache.slot_shadow import LayerShadow, SlotShadow, StepShadow
from compiled_attn.cache.state_cache import StateCache

__all__ = [
    "KVShape",
    "NearLayers",
    "PagedKVCache",
    "gather_blocks",
    "read_blocks",
    "slots_of",
    "strict_index",
    "usage_bias",
    "write_slots",
]


class KVShape(NamedTuple):
    """What one layer stores of a token.

    Args:
        value_dim: elements of a value vector (> 0); None: the value is part of the key (MLA).
        same_as: an earlier layer with the same keys and values, which stores them for both.
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int | None
    same_as: int | None = None


class NearLayers(NamedTuple):
    """The windowed layers of a model, which have fewer blocks than its other layers.

    Args:
        layers: their numbers; layers with the same keys are all among them, or none is.
        window: tokens that a token sees in any of them, itself included.
        num_blocks: blocks of each of them, including the null block.
    """

    layers: tuple[int, ...]
    window: int
    num_blocks: int


class PagedKVCache(nn.Module):
    """Keys and values of every layer in flat slots, addressed by ``block * block_size + offset``.

    Block 0 is the null block: padding points at it, and it stores nothing. The buffers are
    registered but not persistent, so they are in no checkpoint. On Linux large CPU buffers use huge
    pages if the system supports them.

    Args:
        num_layers: layers with keys (> 0, or >= 0 with ``states``).
        num_blocks: blocks of each layer including the null block (>= 2).
        block_size: slots in a block (> 0).
        num_kv_heads: key/value heads (> 0).
        head_dim: elements of a key vector, and of a value vector (> 0).
        dtype: element type of both buffers; one of `QUANTISED` (int8, fp8) adds
            a float32 scale per slot and head to each.
        device: device of the buffers.
        has_value: False if values are part of the keys (MLA); then no V is allocated.
        shapes: shape of each layer, if layers differ; ``num_kv_heads``, ``head_dim`` and
            ``has_value`` are then informative only.
        window: tokens that a token sees in any layer, itself included, if all have a sliding
            window; None: all before it.
        near: layers with blocks of their own; None: all have the same.
        states: recurrent states of layers that have some.

    Raises:
        ValueError: a size is too small; the number of ``shapes`` is not ``num_layers``; ``same_as``
            is not an earlier layer of equal shape with its own buffers.

    Shape:
        - ``key(layer)``, ``value(layer)``: ``[num_blocks * block_size, num_kv_heads, head_dim]``;
          with ``shapes`` those of the layer
        - ``key_scale(layer)``, ``value_scale(layer)``: ``[num_blocks * block_size, num_kv_heads]``
          float32, or None without quantisation
        - ``key_blocks(layer)``, ``value_blocks(layer)``: the same storage viewed as
          ``[num_blocks, block_size, num_kv_heads, head_dim]``

    With ``near`` the null block and block ``near_of[block]`` of these layers, a buffer
    ``[num_blocks]`` int32, stand for a block, see `NearBlocks`.

    Attributes:
        shadow: what the sanitizer checks each step with; None: nothing is checked.

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
        shapes: Sequence[KVShape] | None = None,
        window: int | None = None,
        near: NearLayers | None = None,
        states: StateCache | None = None,
    ) -> None:
        super().__init__()
        self.num_layers = whole("num_layers", num_layers, 1 if states is None else 0)
        self.num_blocks = whole("num_blocks (one of them is the null block)", num_blocks, 2)
        self.block_size = whole("block_size", block_size, 1)
        self.num_kv_heads = whole("num_kv_heads", num_kv_heads, 1)
        self.head_dim = whole("head_dim", head_dim, 1)
        self.has_value = has_value
        self.window = None if window is None else whole("window", window, 1)
        self.is_quantised = dtype in QUANTISED
        self._given_dtype = dtype
        alike = KVShape(num_kv_heads, head_dim, head_dim if has_value else None)
        self.shapes = tuple([alike] * num_layers if shapes is None else shapes)
        _check_shapes(self.shapes, num_layers)
        self.shadow: SlotShadow | None = None
        self.near = near
        if near is not None:
            near_of = torch.zeros(num_blocks, dtype=torch.int32, device=device)
            self.register_buffer("near_of", near_of, persistent=False)
        for layer, shape in enumerate(self.shapes):
            if shape.same_as is None:
                self._allocate(layer, shape, dtype, device)
        self.states = states

    def _allocate(
        self, layer: int, shape: KVShape, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        rows = self.blocks_of(layer) * self.block_size, shape.num_kv_heads
        for name, size in (("key", shape.head_dim), ("value", shape.value_dim)):
            if size is None:
                continue
            buffer = huge_pages.zeros((*rows, size), dtype, device)
            self.register_buffer(f"{name}_{layer}", buffer, persistent=False)
            if self.is_quantised:
                scale = huge_pages.zeros(rows, torch.float32, device)
                self.register_buffer(f"{name}_scale_{layer}", scale, persistent=False)

    def key(self, layer: int) -> Tensor:
        """Flat key slots of a layer, ``[num_blocks * block_size, num_kv_heads, head_dim]``."""
        return self.get_buffer(f"key_{self._home(layer)}")

    def value(self, layer: int) -> Tensor:
        """Flat value slots of a layer; for a layer without V the key slots."""
        name = "value" if self.stores_value(layer) else "key"
        return self.get_buffer(f"{name}_{self._home(layer)}")

    def key_scale(self, layer: int) -> Tensor | None:
        """Scales of each key slot and head; None without quantisation."""
        return self.get_buffer(f"key_scale_{self._home(layer)}") if self.is_quantised else None

    def value_scale(self, layer: int) -> Tensor | None:
        """Scales of each value slot and head; None also for a layer without V."""
        has_scale = self.is_quantised and self.stores_value(layer)
        return self.get_buffer(f"value_scale_{self._home(layer)}") if has_scale else None

    def set_shadow(self, shadow: SlotShadow | None) -> None:
        """Adds a shadow, and the tags of each layer as buffers; None removes them.

        Graphs and block copies that were captured before do not use them.
        """
        for layer, shape in enumerate(self.shapes):
            if shape.same_as is None and shadow is None:
                self._buffers.pop(f"tag_{layer}", None)
            elif shape.same_as is None:
                tags = (self.blocks_of(layer), self.block_size)
                zeros = torch.zeros(tags, dtype=torch.int32, device=self.device)
                self.register_buffer(f"tag_{layer}", zeros, persistent=False)
        self.shadow = shadow

    def tags(self, layer: int) -> Tensor:
        """Tags of the slots of a layer, ``[num_blocks, block_size]`` int32, with a shadow."""
        return self.get_buffer(f"tag_{self._home(layer)}")

    def layer_shadow(self, layer: int, step: StepShadow | None) -> LayerShadow | None:
        """Returns what a layer needs to check a step; None without a shadow."""
        if self.shadow is None or step is None:
            return None
        error = self.shadow.error(layer) if step.error is None else step.error
        return LayerShadow(self.tags(layer), error, step)

    def is_near(self, layer: int) -> bool:
        """Whether a layer has blocks of its own, see `NearLayers`."""
        return self.near is not None and layer in self.near.layers

    def blocks_of(self, layer: int) -> int:
        """Returns the number of blocks of a layer, including the null block."""
        return self.near.num_blocks if self.near and self.is_near(layer) else self.num_blocks

    def buffers_of(self, *, near: bool) -> dict[str, Tensor]:
        """Returns the buffers of the near layers, or those of all others, with their tags."""
        named = {name: each for name, each in self._buffers.items() if each is not None}
        if self.near is None:
            return {} if near else named
        named.pop("near_of")
        layers = {str(layer) for layer in self.near.layers}
        return {name: t for name, t in named.items() if (name.rpartition("_")[2] in layers) is near}

    def stores_value(self, layer: int) -> bool:
        """Whether a layer stores values; False: they are part of its keys."""
        return self.shapes[layer].value_dim is not None

    def _home(self, layer: int) -> int:
        same = self.shapes[layer].same_as if 0 <= layer < self.num_layers else None
        return layer if same is None else same

    def key_blocks(self, layer: int) -> Tensor:
        """Keys of a layer as ``[num_blocks, block_size, num_kv_heads, head_dim]`` (a view)."""
        return self._by_block(self.key(layer))

    def value_blocks(self, layer: int) -> Tensor:
        """Values of a layer as ``[num_blocks, block_size, num_kv_heads, head_dim]`` (a view)."""
        return self._by_block(self.value(layer))

    def _by_block(self, slots: Tensor) -> Tensor:
        return slots.view(-1, self.block_size, *slots.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        """Element type of keys and values."""
        return self.key(0).dtype if self.num_layers else self._given_dtype

    @property
    def device(self) -> torch.device:
        """Device of the buffers."""
        return next(self.buffers()).device

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers but the near ones, K, V and their scales together."""
        return self._bytes_of(near=False)

    @property
    def near_bytes_per_block(self) -> int:
        """Bytes of one near block over all near layers, K, V and their scales together."""
        return self._bytes_of(near=True)

    def _bytes_of(self, *, near: bool) -> int:
        homes = [
            shape
            for layer, shape in enumerate(self.shapes)
            if shape.same_as is None and self.is_near(layer) is near
        ]
        return self.block_size * sum(self._bytes_per_slot(shape) for shape in homes)

    def _bytes_per_slot(self, shape: KVShape) -> int:
        scale = torch.float32.itemsize if self.is_quantised else 0
        sizes = [size for size in (shape.head_dim, shape.value_dim) if size is not None]
        return shape.num_kv_heads * sum(size * self.dtype.itemsize + scale for size in sizes)

    def extra_repr(self) -> str:
        """Sizes, for ``repr``."""
        return (
            f"layers={self.num_layers}, blocks={self.num_blocks}, block_size={self.block_size}, "
            f"kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, dtype={self.dtype}"
        )


def _check_shapes(shapes: tuple[KVShape, ...], num_layers: int) -> None:
    if len(shapes) != num_layers:
        raise ValueError(
            f"shapes: expected one for each of {num_layers} layers, got {len(shapes)}: "
            "pass one per layer"
        )
    for layer, (heads, key, value, same) in enumerate(shapes):
        if min(heads, key, 1 if value is None else value) < 1:
            raise ValueError(
                f"shapes[{layer}]: expected sizes of at least 1, got {shapes[layer]}: "
                "choose larger ones"
            )
        if same is None:
            continue
        if not 0 <= same < layer or shapes[same] != (heads, key, value, None):
            raise ValueError(
                f"shapes[{layer}]: expected same_as to be an earlier layer of its shape with "
                f"buffers of its own, got {same}: name such a layer, or None"
            )


def write_slots(cache: Tensor, new: Tensor, slots: Tensor, scale: Tensor | None) -> Tensor:
    """Writes rows ``[T, Hk, D]`` to slots ``[T]`` of a flat cache, in place.

    Returns:
        The rows as a later step reads them: in the cache's dtype, or dequantised to float32.
    """
    # Inside a captured graph index_copy_ writes T rows and does not copy the cache.
    slots = strict_index(slots.long(), cache.shape[0])
    if cache.dtype not in QUANTISED or scale is None:
        rows = new.to(cache.dtype)
        cache.index_copy_(0, slots, rows)
        return rows
    rows, row_scales = quantise(new, cache.dtype)
    # There is no index_copy_ for float8: copy bytes.
    cache.view(torch.uint8).index_copy_(0, slots, rows.view(torch.uint8))
    scale.index_copy_(0, slots, row_scales)
    return dequantise(rows, row_scales)


def usage_bias(usage: Tensor, block_size: int) -> Tensor:
    """Returns 0 for the first ``usage`` slots, else -inf, ``[...] -> [..., block_size]``."""
    visible = slots_of(block_size, usage) < usage.unsqueeze(-1)
    return torch.where(visible, 0.0, -math.inf)


def gather_blocks(
    cache: Tensor, blocks: Tensor, used: Tensor, scale: Tensor | None = None
) -> Tensor:
    """Reads blocks of a flat cache as ``[B, block_size, Hk, D]``, with zeros in unused slots.

    Args:
        cache: ``[num_blocks * block_size, Hk, D]``.
        blocks: ``[B]`` ids.
        used: ``[B, block_size]`` bool. Other slots may hold NaN, and 0 * NaN is NaN.
        scale: ``[num_blocks * block_size, Hk]`` of a quantised cache, or None.
    """
    read = read_blocks(cache, blocks, used.shape[-1], scale)
    return torch.where(used[:, :, None, None], read, 0)


def read_blocks(
    cache: Tensor, blocks: Tensor | int, block_size: int, scale: Tensor | None = None
) -> Tensor:
    """Reads all slots of blocks as ``[B, block_size, Hk, D]``, in float32 if quantised.

    Args:
        cache, scale: as in `gather_blocks`.
        blocks: ``[B]`` ids, or an int B: the first B blocks, without a gather.
        block_size: slots in a block.
    """
    by_block = cache.unflatten(0, (-1, block_size))
    at = slice(blocks) if isinstance(blocks, int) else strict_index(blocks, by_block.shape[0])
    read = by_block[at]
    return read if scale is None else dequantise(read, scale.unflatten(0, (-1, block_size))[at])


def strict_index(ids: Tensor, limit: int) -> Tensor:
    """Replaces negative ids by ``limit``, which fails as an index.

    In a graph, which cannot check ids, -1 would silently select the last element.
    """
    return torch.where(ids < 0, limit, ids)


def slots_of(block_size: int, like: Tensor) -> Tensor:
    """Returns ``[0, 1, .. block_size - 1]`` on the device of a tensor."""
    return torch.arange(block_size, device=like.device)
