"""A LoRA adapter: its matrices and scales, as peft stores and configures them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_attn.errors import AdapterError
from graphs.errors import quoted

__all__ = ["Adapter", "LoraWeight", "adapter_of"]

_PREFIX = "base_model.model."
_MATRIX = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])(\.default)?\.weight")
# Settings that change what an adapter computes, with the values that change nothing.
_UNSERVED: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "layer_replication": (None, []),
    "megatron_config": (None, {}),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "use_bdlora": (None, False),
}
_LARGE = 1e30  # of lora_alpha: scales are float32
# Kinds of `init_lora_weights` that also change the weights of the base model.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class LoraWeight(NamedTuple):
    """The change of a linear layer: ``scale * b @ a``, of ``a [rank, in]``, ``b [out, rank]``."""

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        """Rank of the change."""
        return self.a.shape[0]


class Adapter(NamedTuple):
    """A LoRA adapter.

    Args:
        source: where it comes from, for errors.
        weights: by the name of the module in the base model.
    """

    source: str
    weights: Mapping[str, LoraWeight]

    @property
    def rank(self) -> int:
        """The largest rank of its weights."""
        return max(weight.rank for weight in self.weights.values())


def adapter_of(source: str, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Adapter:
    """Makes an adapter of the configuration and the tensors that peft stores.

    Args:
        source: where they come from, for errors.
        settings: of ``adapter_config.json``.
        tensors: of ``adapter_model.safetensors``.

    Raises:
        AdapterError: it is of a kind that is not served, or its parts do not fit together.
    """
    _refuse_unserved(source, settings)
    matrices: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _MATRIX.fullmatch(name.removeprefix(_PREFIX))
        if match is None or not name.startswith(_PREFIX):
            raise AdapterError(
                f"adapter {source}: expected lora_A and lora_B of linear layers, got a tensor "
                f"{name!r}: train without it, or merge the adapter into the model"
            )
        matrices.setdefault(match["module"], {})[match["matrix"]] = tensor
    if not matrices:
        raise AdapterError(f"adapter {source}: expected lora_A and lora_B, got no tensor: train it")
    return Adapter(
        source,
        {name: _weight_of(source, name, pair, settings) for name, pair in sorted(matrices.items())},
    )


def _refuse_unserved(source: str, settings: Mapping[str, Any]) -> None:
    if (kind := settings.get("peft_type")) != "LORA":
        raise AdapterError(
            f"adapter {source}: expected peft_type 'LORA', got {kind!r}: merge it into the model"
        )
    for name, harmless in _UNSERVED.items():
        if (value := settings.get(name)) not in harmless:
            raise AdapterError(
                f"adapter {source}: expected plain LoRA, got {name}={value!r}, which is not "
                "served: train without it, or merge the adapter into the model"
            )
    start = settings.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise AdapterError(
            f"adapter {source}: its init_lora_weights={start!r} changed the base model, too: save "
            "it with path_initial_model_for_weight_conversion, as peft describes"
        )


def _weight_of(
    source: str, name: str, pair: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> LoraWeight:
    if {*pair} != {"A", "B"}:
        raise AdapterError(
            f"adapter {source}: expected lora_A and lora_B of {name}, got lora_{min(pair)} only: "
            "its file is damaged, save it again"
        )
    a, b = pair["A"], pair["B"]
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
        raise AdapterError(
            f"adapter {source}: expected lora_A [rank, in] and lora_B [out, rank] of {name}, got "
            f"{[*a.shape]} and {[*b.shape]}: only linear layers are served"
        )
    for matrix in (a, b):
        if matrix.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise AdapterError(
                f"adapter {source}: expected float weights of {name}, got {matrix.dtype}: save it "
                "in float32 or bfloat16"
            )
    rank = a.shape[0]
    if (configured := _pattern(source, settings, "rank_pattern", name, settings.get("r"))) != rank:
        raise AdapterError(
            f"adapter {source}: expected rank {configured} of {name} by its configuration, got "
            f"{rank} in its weights: its files do not belong together, save it again"
        )
    alpha = _pattern(source, settings, "alpha_pattern", name, settings.get("lora_alpha"))
    if not isinstance(alpha, (int, float)) or not abs(alpha) < _LARGE:
        raise AdapterError(
            f"adapter {source}: expected a number as lora_alpha, got {quoted(alpha)}"
        )
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    return LoraWeight(a, b, scale)


def _pattern(source: str, settings: Mapping[str, Any], name: str, module: str, default: Any) -> Any:
    """The value of the first pattern that a module's name ends with, as peft looks it up."""
    try:
        for pattern, value in (settings.get(name) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
    except (AttributeError, re.error) as error:
        raise AdapterError(
            f"adapter {source}: expected {name} as an object of patterns, got "
            f"{quoted(settings[name])}: its configuration is damaged, save it again"
        ) from error
    return default
