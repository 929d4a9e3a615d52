"""Loads GGUF files directly: quantised weights stay in the bits that the file has them in.

llama.cpp multiplies weights of all these formats by inputs of int8, so layers do here (``w4a8``).
transformers knows the names and the order of rows of each family; what it does to a weight is
asked with numbers of rows in place of a weight, so that packed rows can be moved likewise.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from compiled_attn.errors import ModelError
from compiled_attn.models.empty_model import EmptyWeights, empty_model
from compiled_attn.models.gguf_blocks import FORMATS
from compiled_attn.ops.quantised_linear import QuantisedWeight

__all__ = ["fast_readers", "load_gguf", "open_gguf"]

_FLOATS = ("F32", "F16", "BF16", "F64")
_ROWS_AT_ONCE = 2048  # bounds temporary memory


def open_gguf(file: Path) -> Any:
    """Opens a file as ``gguf.GGUFReader``, which maps it into memory.

    Raises:
        ModelError: it is truncated, damaged, or has a tensor of a type that is not served.
    """
    import gguf

    tensor = ""

    class Reader(_fast_reader()):  # type: ignore[misc]
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type == gguf.GGUFValueType.ARRAY:
                data: Any = self.data
                memory = memoryview(data)  # numpy is slow at single numbers
                kind, count = struct.unpack_from("<IQ", memory, orig_offs)
                if kind == gguf.GGUFValueType.STRING:  # all tokens, which are not needed here
                    at = orig_offs + 12
                    for _ in range(count):
                        at += 8 + struct.unpack_from("<Q", memory, at)[0]
                    return at - orig_offs, [], [], [raw_type]
            return super()._get_field_parts(orig_offs, raw_type)

        def _build_tensors(self, start_offs: int, fields: Any) -> None:
            nonlocal tensor
            found = []
            for field in fields:
                tensor = f"tensor {field.name} "
                super()._build_tensors(start_offs, [field])
                found += self.tensors
            self.tensors = found

    try:
        reader = Reader(file)
    except (ValueError, IndexError, KeyError, OverflowError, struct.error) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"model {file}: {tensor}cannot be read ({reason}): the file is truncated, damaged, or "
            "of a newer kind: download it again"
        ) from error
    for each in reader.tensors:
        kind = each.tensor_type.name
        if kind not in FORMATS and kind not in _FLOATS:
            raise ModelError(
                f"model {file}: tensor {each.name} is of type {kind}, expected one of "
                f"{', '.join([*FORMATS, *_FLOATS])}: use a file of one of these"
            )
    return reader


@contextmanager
def fast_readers() -> Iterator[None]:
    """Context in which transformers reads GGUF files in a third of the time."""
    import gguf

    before = gguf.GGUFReader
    gguf.GGUFReader = _fast_reader()
    try:
        yield
    finally:
        gguf.GGUFReader = before


def _fast_reader() -> Any:
    import gguf

    class FastReader(gguf.GGUFReader):
        """Slices a plain array, as each slice of a `numpy.memmap` runs Python code."""

        @property
        def data(self) -> NDArray[Any]:
            return self._plain

        @data.setter
        def data(self, mapped: NDArray[Any]) -> None:
            self._plain = np.asarray(mapped)  # keeps the mapping alive

    return FastReader


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
    from gguf import dequantize
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    reader = open_gguf(file)
    model: nn.Module = empty_model(config, dtype)
    family = bytes(reader.fields["general.architecture"].parts[-1]).decode()
    process = TENSOR_PROCESSORS.get(family, TensorProcessor)(config=config.to_dict()).process
    names = get_gguf_hf_weights_map(_Named(model), TENSOR_PROCESSORS.get(family, TensorProcessor)())
    parsed: dict[str, Any] = {"tensors": {}}
    weights = EmptyWeights(model)

    for tensor in reader.tensors:
        given: dict[str, Any] = {"tensor_key_mapping": names, "parsed_parameters": parsed}
        kind, name = tensor.tensor_type.name, names.get(tensor.name)
        with _in_tensor(file, tensor.name, kind):
            if quantises and name in weights and weights.can_quantise(name) and kind in FORMATS:
                order = _order_of_rows(process, tensor, given)
                if order is not None:
                    weights.quantise(name, _packed(tensor, order), kind, int8_inputs=True)
                    continue
            done = process(
                weights=dequantize(tensor.data, tensor.tensor_type), name=tensor.name, **given
            )
            if names.get(done.name) in weights:
                weights.put(names[done.name], torch.from_numpy(np.array(done.weights)).to(dtype))
    for name, whole in parsed["tensors"].items():
        if name in weights:
            weights.put(name, whole.to(dtype))
    if missing := weights.missing():
        raise ModelError(
            f"model {file}: {len(missing)} weights are missing, {missing[0]} first: it is damaged, "
            "or of a kind that transformers does not know"
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


@contextmanager
def _in_tensor(file: Path, tensor: str, kind: str) -> Iterator[None]:
    """Names the tensor in errors about its contents."""
    try:
        yield
    except (ValueError, IndexError) as error:
        raise ModelError(
            f"model {file}: tensor {tensor} ({kind}): {error}: the file is damaged, or does not "
            "fit its configuration"
        ) from error


def _order_of_rows(
    process: Callable[..., Any], tensor: Any, given: Mapping[str, Any]
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


def _packed(tensor: Any, order: NDArray[np.int64]) -> QuantisedWeight:
    """Packs a tensor of one of `FORMATS`, with its rows in this order."""
    form = FORMATS[tensor.tensor_type.name]
    parts = []
    for begin in range(0, len(order), _ROWS_AT_ONCE):
        rows = tensor.data[order[begin : begin + _ROWS_AT_ONCE]]
        blocks = form.parse(rows.reshape(len(rows), -1, form.bytes))
        if not np.isfinite(blocks.scales).all():
            raise ValueError("expected finite scales, got NaN or infinity")
        codes, scales, steps = (
            None if each is None else torch.from_numpy(np.ascontiguousarray(each))
            for each in blocks
        )
        assert codes is not None and scales is not None
        parts.append(QuantisedWeight.pack(codes, form.bits, scales, steps))
    return QuantisedWeight.join(parts)
