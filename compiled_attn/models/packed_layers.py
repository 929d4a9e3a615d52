"""Layers with packed weights, which compute by the op ``packed_linear``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from compiled_attn.errors import ModelChanged
from compiled_attn.models.packed_weight import WriteTrap
from compiled_attn.ops import load, packed_linear

__all__ = ["PackedEmbedding", "PackedLayer", "PackedLinear"]


class PackedLayer(nn.Module):
    """A layer with a packed ``weight``, which `state_dict` returns and accepts as a plain one.

    Args:
        weight: ``[N, K]`` in the memory order of the op, or hidden by ``trap``.
        packed: the integers of a weight that the parameter does not store, else None.
        trap: hides the parameter of packed integers, else None.

    Attributes:
        single: for a weight in halves an empty tensor of the dtype it represents, else None.
    """

    packed: Tensor | None
    single: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        packed: Tensor | None = None,
        trap: WriteTrap | None = None,
    ) -> None:
        super().__init__()
        self.weight, self.trap = weight, trap
        self.register_buffer("packed", packed, persistent=False)
        is_halves = packed is not None and packed.dtype is torch.int16
        single = torch.empty(0, dtype=torch.float32) if is_halves else None
        self.register_buffer("single", single, persistent=False)  # cast together with the model
        load()

    @property
    def _stored(self) -> Tensor:
        """The weight in the memory order of the op."""
        return self.weight if self.packed is None else self.packed

    def _is_cast(self) -> bool:
        if self.single is not None:
            return self.single.dtype is not torch.float32
        return not packed_linear.is_packed(self._stored)

    def plain_weight(self) -> Tensor:
        """Returns the weight ``[N, K]``, unpacked."""
        weight = packed_linear.unpack(self._stored.detach())
        return weight if self.single is None else weight.to(self.single.dtype)

    @property
    def _plain_shape(self) -> tuple[int, int]:
        panels, groups, *tile = self._stored.shape
        return panels * tile[0], groups * tile[1]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLayer:
        if self.trap is None or not self.trap.is_hidden(self.weight):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            return self
        shape = self.weight.shape
        self.weight.data = self.weight.data[:1, :1]  # a cast or move allocates memory for it
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            self.weight.data = self.weight.data.expand(shape)
            self.trap.hide(self.weight)
        return self

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.trap is not None and self.weight.isnan().all():
            self.trap.hide(self.weight)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.plain_weight()

    def _load_from_state_dict(self, state: Any, prefix: str, *others: Any) -> None:
        name = f"{prefix}weight"
        plain = state.get(name)
        if plain is None or plain.shape != self._plain_shape:
            super()._load_from_state_dict(state, prefix, *others)  # reports what does not fit
        elif self.packed is None:
            packed = packed_linear.arrange(plain.to(self.weight), self.weight.shape[-1])
            super()._load_from_state_dict({**state, name: packed}, prefix, *others)
        else:
            *_, missing, _, errors = others
            self._pack_into(name, plain, self.packed, errors)
            rest = {key: value for key, value in state.items() if key != name}
            super()._load_from_state_dict(rest, prefix, *others)
            if name in missing:
                missing.remove(name)

    def _pack_into(self, name: str, plain: Tensor, packed: Tensor, errors: list[str]) -> None:
        """Packs a plain weight into ``packed``; appends an error if that is impossible."""
        single = plain.to(packed.device, torch.float32)
        if packed_linear.fits_bf16(single):
            packed.copy_(packed_linear.pack_bf16(single))
            return
        errors.append(
            f"expected for {name} weights that bfloat16 holds exactly, like those that an engine "
            "packed into 16 bits, got others: load the model again, and use weights 'packed'"
        )


class PackedLinear(PackedLayer):
    """A linear layer that calls the op ``packed_linear``; replaces ``linear``, which is packed.

    ``stored``: the weight's integers and trap if the parameter does not store them.
    """

    def __init__(self, linear: nn.Linear, *stored: Any) -> None:
        super().__init__(linear.weight, *stored)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias

    def forward(self, input: Tensor) -> Tensor:
        """Computes the layer's output."""
        # The op has no backward, and a check may have cast the weight.
        if self._is_cast() or not self._supports(input.dtype) or self._needs_gradients(input):
            return self.plain(input)
        rows = input.reshape(-1, self.in_features).contiguous()
        return self._multiply(rows).view(*input.shape[:-1], self.out_features)

    def _multiply(self, rows: Tensor) -> Tensor:
        out: Tensor = torch.ops.compiled_attn.packed_linear(rows, self._stored, self.bias)
        return out

    def _supports(self, dtype: torch.dtype) -> bool:
        return self.single is None or dtype is torch.float32

    def _needs_gradients(self, input: Tensor) -> bool:
        if self.packed is not None and self.weight.requires_grad:
            raise ModelChanged(
                f"expected packed weights {[*self.weight.shape]} to need no gradients, "
                "got requires_grad: load the model again, and use weights 'packed' or 'plain'"
            )
        own = input, self._stored, self.bias
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in own)

    def plain(self, input: Tensor) -> Tensor:
        """Computes the output like a plain layer, with the weight unpacked for this call."""
        weight = packed_linear.unpack(self._stored)
        if self.single is not None:
            weight = weight.to(self.single.dtype)
        return functional.linear(input, weight, self.bias)

    def extra_repr(self) -> str:
        """Sizes, as `torch.nn.Linear` has them."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


class PackedEmbedding(PackedLayer):
    """An embedding that shares its weight with a packed head; see `PackedLinear`."""

    def __init__(self, embedding: nn.Embedding, *stored: Any) -> None:
        super().__init__(embedding.weight, *stored)
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim

    def forward(self, ids: Tensor) -> Tensor:
        """Looks up the rows of ids."""
        rows = self._rows(ids)
        return rows if self.single is None else rows.to(self.single.dtype)

    def _rows(self, ids: Tensor) -> Tensor:
        weight = self._stored
        needs_gradients = torch.is_grad_enabled() and weight.requires_grad
        if needs_gradients or not packed_linear.is_packed(weight):
            return packed_linear.rows(weight, ids)
        # An op, as inductor would repeat the lookup of each element for every reader.
        flat = ids.reshape(-1).long().contiguous()
        return torch.ops.compiled_attn.packed_rows(weight, flat).view(*ids.shape, -1)  # type: ignore[no-any-return]
