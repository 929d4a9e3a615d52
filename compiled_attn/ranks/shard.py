"""Tensor parallelism with plain local weights and functional all-reduces.

As in Shoeybi et al., "Megatron-LM", 2019: the first of two linear layers is split by output
features (or attention heads), the second by input features, and its outputs are all-reduced. The
split follows transformers' ``tp_plan``. There are no DTensors, so layers stay nested compile
regions.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compiled_attn.errors import ModelRefused
from compiled_attn.models.packed import dequantise_layers
from compiled_attn.ranks.group import Ranks

__all__ = ["AllReduced", "shard"]

_REPLICATED = {
    "colwise_gather_output",
    "colwise_rep",
    "embedding_rowwise",
    "replicate",
    "replicated_with_grad_allreduce",
}


class AllReduced(nn.Module):
    """Sums the outputs of a module over the ranks."""

    def __init__(self, part: nn.Module, group: str) -> None:
        super().__init__()
        self.part, self._group = part, group

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the sum, the same on every rank."""
        ops = torch.ops._c10d_functional  # functional, and known to torch.compile
        out = self.part(*args, **kwargs).contiguous()
        total: Tensor = ops.wait_tensor(ops.all_reduce(out, "sum", self._group))
        return total


def shard(model: PreTrainedModel, ranks: Ranks) -> PreTrainedModel:
    """Shard a model for one rank, in place; returns the model.

    Norms, embeddings and the head are replicated. Key and value heads are split, or replicated on
    several ranks where there are fewer heads than ranks. Weights that a file has quantised become
    plain ones.

    Args:
        ranks: ranks of the process group; one rank changes nothing.

    Raises:
        ModelRefused: transformers has no ``tp_plan`` for it, or one with unknown styles, or heads
            or features are not divisible by the number of ranks. The model is unchanged.
    """
    if ranks.count == 1:
        return model
    dequantise_layers(model)
    splits = _splits(model)
    _check_sizes(model, ranks, splits)
    for name, style in splits.items():
        if style != "moe_tp_experts":
            _split(model, name, style, ranks)
    for name, style in splits.items():
        module = _module(model, name)
        if style == "moe_tp_experts" or (style == "rowwise" and module is not None):
            assert module is not None
            _replace(model, name, AllReduced(module, ranks.group))
    for each in model.modules():
        if hasattr(each, "num_key_value_groups"):  # read by eager attention
            each.num_key_value_groups = _local_groups(model, ranks)
    return model


def _splits(model: PreTrainedModel) -> dict[str, str]:
    """Style by name of the modules and parameters to split."""
    plan = dict(model.tp_plan)
    if not plan or all(style in _REPLICATED for style in plan.values()):
        raise _refused(model, "with a tp_plan in transformers", "none")
    patterns = {re.compile(re.escape(name).replace(r"\*", r"\d+")): plan[name] for name in plan}
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    found = {
        name: style for name in names for each, style in patterns.items() if each.fullmatch(name)
    }
    known = {"colwise", "rowwise", "packed_colwise", "moe_tp_experts", *_REPLICATED}
    if others := sorted({*found.values()} - known):
        raise _refused(
            model, f"whose tp_plan has only {', '.join(sorted(known))}", ", ".join(others)
        )
    return {name: style for name, style in found.items() if style not in _REPLICATED}


def _check_sizes(model: PreTrainedModel, ranks: Ranks, splits: dict[str, str]) -> None:
    config = model.config.get_text_config()
    heads, kv_heads = config.num_attention_heads, _kv_heads(model)
    if heads % ranks.count or (kv_heads % ranks.count and ranks.count % kv_heads):
        expected = f"whose heads are divisible by {ranks.count} ranks"
        raise _refused(model, expected, f"{heads} heads and {kv_heads} of keys and values")
    for name, style in splits.items():
        if style == "moe_tp_experts" or _is_kv(name):
            continue
        size = _weight(model, name).shape[_dim(style, _weight(model, name))]
        if size % (ranks.count * (2 if style == "packed_colwise" else 1)):
            expected = f"whose features are divisible by {ranks.count} ranks"
            raise _refused(model, expected, f"{size} of {name}")


def _split(model: PreTrainedModel, name: str, style: str, ranks: Ranks) -> None:
    weight = _weight(model, name)
    dim, index, count = _dim(style, weight), ranks.rank, ranks.count
    if _is_kv(name) and (several := count // min(count, _kv_heads(model))) > 1:
        index, count = index // several, count // several
    groups = weight.data.chunk(2 if style == "packed_colwise" else 1, dim)
    parts = [group.chunk(count, dim)[index] for group in groups]
    weight.data = torch.cat(parts, dim).contiguous()
    module = _module(model, name)
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = weight.shape
        bias: Tensor | None = module.bias
        if bias is not None and style == "colwise":
            bias.data = bias.data.chunk(count)[index].clone()
        if bias is not None and style == "rowwise" and ranks.rank:
            bias.data.zero_()  # only rank 0 adds the bias


def _module(model: nn.Module, name: str) -> nn.Module | None:
    return dict(model.named_modules()).get(name)


def _weight(model: nn.Module, name: str) -> nn.Parameter:
    return model.get_parameter(name if _module(model, name) is None else f"{name}.weight")


def _dim(style: str, weight: Tensor) -> int:
    """The split dimension: outputs are the last but one, inputs the last."""
    return weight.dim() - (1 if style == "rowwise" else 2)


def _is_kv(name: str) -> bool:
    return name.endswith(("k_proj", "v_proj"))


def _kv_heads(model: PreTrainedModel) -> int:
    config = model.config.get_text_config()
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _local_groups(model: PreTrainedModel, ranks: Ranks) -> int:
    heads = model.config.get_text_config().num_attention_heads // ranks.count
    return int(heads // max(1, _kv_heads(model) // ranks.count))


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _refused(model: PreTrainedModel, expected: str, got: str) -> ModelRefused:
    return ModelRefused(
        f"expected a model {expected}, got {type(model).__name__} with {got}: use one process, or "
        "another number of ranks"
    )
