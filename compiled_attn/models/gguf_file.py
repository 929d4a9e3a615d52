"""Loads GGUF files directly: quantised weights stay in the bits that the file has them in.

llama.cpp multiplies weights of all these formats by inputs of int8, so layers do here (``w4a8``).
transformers knows the names and the order of rows of each family; what it does to a weight is
asked with numbers of rows in place of a weight, so that packed rows can be moved likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from compiled_attn.errors import ModelError
from compiled_attn.models.empty_model import EmptyWeights, empty_model, in_tensor
from compiled_attn.models.gguf_blocks import FORMATS
from compiled_attn.models.gguf_header import GGUFTensor, open_gguf
from compiled_attn.ops.quantised_linear import QuantisedWeight

__all__ = ["load_gguf"]

_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim",
)  # fmt: skip
_NOT_FINITE = "expected finite scales, got NaN or infinity"
_ROWS_AT_ONCE = 2048  # bounds temporary memory


def load_gguf(file: Path, config: Any, dtype: torch.dtype, quantises: bool = True) -> nn.Module:
    """Builds a causal language model from a file.

    Args:
        file: the GGUF file.
        config: its configuration, as transformers reads it.
        dtype: of the weights that are not quantised.
        quantises: whether weights of linear layers and embeddings stay as they are in the file;
            otherwise all are converted to ``dtype``.

    Raises:
        ModelError: the file is damaged, or lacks weights.
    """
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    opened = open_gguf(file)
    family, tensors = opened.family, opened.tensors
    _check_sizes(file, config, tensors)
    model: nn.Module = empty_model(config, dtype)
    process = TENSOR_PROCESSORS.get(family, TensorProcessor)(config=config.to_dict()).process
    names = get_gguf_hf_weights_map(_Named(model), TENSOR_PROCESSORS.get(family, TensorProcessor)())
    parsed: dict[str, Any] = {"tensors": {}}
    weights = EmptyWeights(model)

    for tensor in tensors:
        given: dict[str, Any] = {"tensor_key_mapping": names, "parsed_parameters": parsed}
        kind, name = tensor.kind, names.get(tensor.name)
        with in_tensor(file, f"{tensor.name} ({kind})"):
            if quantises and name in weights and weights.can_quantise(name) and kind in FORMATS:
                order = _order_of_rows(process, tensor, given)
                if order is not None:
                    weights.quantise(name, _packed(tensor, order), kind, int8_inputs=True)
                    continue
            done = process(weights=_plain(tensor), name=tensor.name, **given)
            if names.get(done.name) in weights:
                weights.put(names[done.name], torch.from_numpy(np.array(done.weights)).to(dtype))
    for name, whole in parsed["tensors"].items():
        if name in weights:
            weights.put(name, whole.to(dtype))
    if missing := weights.missing():
        raise ModelError(
            f"model {file}: {len(missing)} weights are missing, {missing[0]} first: it is damaged, "
            "or of a kind that transformers does not know: use safetensors of the model"
        )
    return model


class _Named:
    """A model for transformers' search for names, which takes a minute if it visits all modules."""

    def __init__(self, model: Any, has_base: bool = True) -> None:
        self.config, self._model, self._has_base = model.config, model, has_base

    def state_dict(self) -> dict[str, Any]:
        """Names of the parameters."""
        return dict.fromkeys(self._model.state_dict())

    def named_children(self) -> list[tuple[str, _Named]]:
        """The base model: files of some families have names without its prefix."""
        base, prefix = self._model.base_model, self._model.base_model_prefix
        return [(prefix, _Named(base, False))] if self._has_base and base is not self._model else []


def _check_sizes(file: Path, config: Any, tensors: list[GGUFTensor]) -> None:
    """Refuses a model larger than the tensors of its file, before it is built."""
    layers = getattr(config, "num_hidden_layers", 0)
    if layers > len(tensors):
        raise ModelError(
            f"model {file}: expected at most as many layers as tensors, {len(tensors)}, got "
            f"{layers:,}: the file is damaged: download it again"
        )
    most = max((size for each in tensors for size in each.data.shape), default=0) * 2
    for name in _SIZES:
        if isinstance(size := getattr(config, name, None), int) and not 0 <= size <= most:
            raise ModelError(
                f"model {file}: expected {name} of at most {most:,}, as its tensors are no larger, "
                f"got {size:,}: the file is damaged: download it again"
            )


def _plain(tensor: GGUFTensor) -> NDArray[Any]:
    from gguf import GGMLQuantizationType, dequantize

    if tensor.data.dtype != np.uint8:
        return tensor.data.astype(np.float32)
    plain: NDArray[Any] = dequantize(tensor.data, GGMLQuantizationType[tensor.kind])
    if tensor.kind in FORMATS and not np.isfinite(plain).all():
        raise ValueError(_NOT_FINITE)
    return plain


def _order_of_rows(
    process: Callable[..., Any], tensor: GGUFTensor, given: Mapping[str, Any]
) -> NDArray[np.int64] | None:
    """Which row of the file each row of the weight is; None: it is not made of rows."""
    rows, scratch = tensor.data.shape[0], {**given, "parsed_parameters": {"tensors": {}}}
    numbers = np.repeat(np.arange(rows, dtype=np.float64)[:, None], 2, 1)
    done = process(weights=numbers, name=tensor.name, **scratch)
    made = done.weights
    is_moved = done.name == tensor.name and made is not None and made.shape == numbers.shape
    if not is_moved or not (made[:, 0] == made[:, 1]).all():
        return None
    order = made[:, 0].astype(np.int64)
    return order if (np.sort(order) == np.arange(rows)).all() else None


def _packed(tensor: GGUFTensor, order: NDArray[np.int64]) -> QuantisedWeight:
    """Packs a tensor of one of `FORMATS`, with its rows in this order."""
    form = FORMATS[tensor.kind]
    parts = []
    for begin in range(0, len(order), _ROWS_AT_ONCE):
        rows = tensor.data[order[begin : begin + _ROWS_AT_ONCE]]
        blocks = form.parse(rows.reshape(len(rows), -1, form.bytes))
        if not np.isfinite(blocks.scales).all():
            raise ValueError(_NOT_FINITE)
        codes, scales, steps = (
            None if each is None else torch.from_numpy(np.ascontiguousarray(each))
            for each in blocks
        )
        assert codes is not None and scales is not None
        parts.append(QuantisedWeight.pack(codes, form.bits, scales, steps))
    return QuantisedWeight.join(parts)
