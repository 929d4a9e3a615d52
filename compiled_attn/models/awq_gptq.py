"""Loads AWQ and GPTQ checkpoints: weights stay in 4 or 8 bits.

Both store ``qweight``, ``qzeros`` and ``scales`` of a linear layer in safetensors, as AutoAWQ
(https://github.com/casper-hansen/AutoAWQ, gemm) and GPTQModel
(https://github.com/ModelCloud/GPTQModel) do: codes in int32, groups along the inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compiled_attn.errors import ModelError
from compiled_attn.models.empty_model import EmptyWeights, empty_model, in_tensor
from compiled_attn.ops.quantised_linear import QuantisedWeight

__all__ = ["METHODS", "load_awq_gptq"]

METHODS = ("awq", "gptq")
"""Values of ``quant_method`` in a ``quantization_config``."""

_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # position of each output's code in an int32
_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_KINDS = {
    "scales": (torch.float16, torch.bfloat16, torch.float32),
    "g_idx": (torch.int32, torch.int64),
}


def load_awq_gptq(
    folder: Path, config: Any, settings: Mapping[str, Any], dtype: torch.dtype
) -> nn.Module:
    """Builds a causal language model from a directory.

    Args:
        folder: with safetensors.
        config: its configuration, without ``quantization_config``.
        settings: that ``quantization_config``.
        dtype: of the weights that are not quantised.

    Raises:
        ModelError: the settings are of a kind that is not served, or weights are missing or do not
            fit together.
    """
    method = settings["quant_method"]
    bits = _bits_of(folder, settings)
    model: nn.Module = empty_model(config, dtype)
    weights, layers = EmptyWeights(model), dict[str, dict[str, Tensor]]()
    for name, value in _tensors(folder):
        layer, _, part = name.rpartition(".")
        if part in _PARTS:
            layers.setdefault(layer, {})[part] = value
            found = layers[layer]
            if {*_PARTS} - {*found} <= {"g_idx"} and (method == "awq" or "g_idx" in found):
                _add_layer(folder, weights, layer, layers.pop(layer), settings, bits)
        elif name in weights:
            with in_tensor(folder, name):
                weights.put(name, value.to(dtype))
    for layer, found in layers.items():  # without g_idx: groups in order
        _add_layer(folder, weights, layer, found, settings, bits)
    if missing := weights.missing():
        raise ModelError(
            f"model {folder}: {len(missing)} weights are missing, {missing[0]} first: it is "
            "damaged, or of a kind that transformers converts while it loads: use the original "
            "model"
        )
    return model


def _bits_of(folder: Path, settings: Mapping[str, Any]) -> int:
    """Checks the settings; returns the bits of a code."""
    method, bits = settings["quant_method"], settings.get("bits", settings.get("w_bit"))
    served = (4,) if method == "awq" else (4, 8)
    version = str(settings.get("version", "gemm")).lower()
    if bits not in served or (method == "awq" and version != "gemm"):
        got = f"{bits} bits" + (f", version {version}" if method == "awq" else "")
        raise ModelError(
            f"model {folder}: expected {method} weights of {' or '.join(map(str, served))} bits"
            f"{', version gemm' if method == 'awq' else ''}, got {got}: use another checkpoint"
        )
    return int(bits)


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    yield name, opened.get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"model {file}: cannot be read: {error}: download it again") from error


def _add_layer(
    folder: Path,
    weights: EmptyWeights,
    layer: str,
    parts: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    bits: int,
) -> None:
    method, name = settings["quant_method"], f"{layer}.weight"
    needed = _PARTS if method == "gptq" and settings.get("desc_act") else _PARTS[:3]
    if lacks := [part for part in needed if part not in parts]:
        raise ModelError(f"model {folder}: tensor {layer}.{lacks[0]} is missing: download it again")
    if name not in weights or not weights.can_quantise(name):
        raise ModelError(
            f"model {folder}: tensor {layer}.qweight belongs to no linear layer of whole multiples "
            "of 16 outputs and 32 inputs: use the original model"
        )
    with in_tensor(folder, f"{layer}.qweight"):
        order = None
        _check_kinds(parts)
        if method == "awq":
            codes = _unpacked(parts["qweight"], bits, 1, _AWQ_ORDER)
            zeros = _unpacked(parts["qzeros"], bits, 1, _AWQ_ORDER)
        else:
            codes = _unpacked(parts["qweight"], bits, 0)
            zeros = _unpacked(parts["qzeros"], bits, 1)
            if settings.get("checkpoint_format", "gptq") != "gptq_v2":
                zeros = zeros.short() + 1  # as it stores one less
                if (most := int(zeros.max())) > 255:
                    raise ValueError(f"expected zero points of at most 255, got {most}")
            order = _order(parts.get("g_idx"), codes.shape[0], zeros.shape[0])
            codes = codes if order is None else codes[order]
        scales = parts["scales"].float()
        if not scales.isfinite().all():
            raise ValueError("expected finite scales, got NaN or infinity")
        if scales.shape != zeros.shape or scales.shape[1] != codes.shape[1]:
            raise ValueError(
                f"expected scales and zero points of one shape for codes {[*codes.shape]}, got "
                f"{[*scales.shape]} and {[*zeros.shape]}"
            )
        halves = scales.half()
        fits = torch.equal(halves.float(), scales)
        packed = QuantisedWeight.pack(
            codes.T, bits, (halves if fits else scales).T, zeros.T.to(torch.uint8)
        )
        weights.quantise(name, packed, method.upper(), order=order)


def _check_kinds(parts: Mapping[str, Tensor]) -> None:
    for name, part in parts.items():
        is_known = part.dtype in _KINDS.get(name, (torch.int32,))
        if not is_known or part.dim() != (1 if name == "g_idx" else 2) or not part.numel():
            raise ValueError(
                f"expected {name} as a matrix of int32, scales of floats, g_idx of one dimension, "
                f"got {part.dtype} {[*part.shape]}"
            )


def _unpacked(packed: Tensor, bits: int, dim: int, positions: list[int] | None = None) -> Tensor:
    """Codes of int32 along a dimension, as uint8; ``positions``: of each within an int32."""
    count = 32 // bits
    shifts = torch.arange(count)[positions or slice(None)] * bits
    shifts = shifts[:, None] if dim == 0 else shifts
    codes: Tensor = (packed.unsqueeze(dim + 1) >> shifts) & (2**bits - 1)
    return codes.flatten(dim, dim + 1).byte()


def _order(groups: Tensor | None, inputs: int, count: int) -> Tensor | None:
    """Order of the inputs in which groups follow one another; None: as they are."""
    if groups is None:
        return None
    order = torch.argsort(groups.long(), stable=True)
    size = inputs // count
    if not torch.equal(groups.long()[order], torch.arange(count).repeat_interleave(size)):
        raise ValueError(f"expected {count} groups of {size} inputs in g_idx, got others")
    return None if torch.equal(order, torch.arange(inputs)) else order
