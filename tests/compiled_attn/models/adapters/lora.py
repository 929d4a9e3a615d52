"""Drawn LoRA adapters, as files and merged into a model."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from compiled_attn.models.adapters import Adapter, adapter_of


def tensors(
    model: nn.Module, targets: Sequence[str], rank: int, seed: int, size: float = 0.3
) -> dict[str, Tensor]:
    """Matrices for all layers whose names end so, named as peft names them."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name.rpartition(".")[2] in targets:
            path, (outputs, inputs) = f"base_model.model.{name}", layer.weight.shape
            found[f"{path}.lora_A.weight"] = size * torch.randn(rank, inputs, generator=generator)
            found[f"{path}.lora_B.weight"] = size * torch.randn(outputs, rank, generator=generator)
    return found


def settings(rank: int, **changes: Any) -> dict[str, Any]:
    """What peft writes into adapter_config.json, in part."""
    return {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"} | changes


def drawn(
    model: nn.Module, seed: int, *, rank: int = 4, targets: Sequence[str] = ("q_proj", "v_proj")
) -> Adapter:
    """An adapter of a model."""
    return adapter_of(f"drawn {seed}", settings(rank), tensors(model, targets, rank, seed))


def saved(folder: Path, parts: dict[str, Tensor], config: dict[str, Any]) -> Path:
    """A folder as peft saves it."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(parts, folder / "adapter_model.safetensors")
    return folder


def merged(model: Any, adapter: Adapter | None) -> Any:
    """A copy of a model whose weights have the change of an adapter."""
    whole = copy.deepcopy(model)
    for name, weight in ({} if adapter is None else adapter.weights).items():
        layer: Any = whole.get_submodule(name)
        change = weight.scale * weight.b @ weight.a
        layer.weight.data += change if isinstance(layer, nn.Linear) else change.T  # of GPT-2
    return whole
