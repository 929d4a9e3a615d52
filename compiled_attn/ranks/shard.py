"""A model's share of one rank: plain local weights, and sums over the ranks where parts meet.

Tensor parallelism (Shoeybi et al., "Megatron-LM", 2019): of the first of two linear layers a rank
has some outputs, of the second the inputs that belong to these, and the ranks add what comes out.
Heads of attention are such outputs. Which layer is cut how says the model's own plan, that of
transformers. There are no tensors that know of ranks, so layers stay regions that compile once.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compiled_attn.errors import ModelRefused
from compiled_attn.ranks.group import Ranks

__all__ = ["Summed", "shard"]

_KEPT = {
    "colwise_gather_output",
    "colwise_rep",
    "embedding_rowwise",
    "replicate",
    "replicated_with_grad_allreduce",
}


class Summed(nn.Module):
    """A module whose outputs are parts of a sum over the ranks.

    Args:
        part: the module.
        group: name of the process group.

    Shape:
        - forward: as the module's
    """

    def __init__(self, part: nn.Module, group: str) -> None:
        super().__init__()
        self.part, self._group = part, group

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The sum, the same on every rank."""
        ops = torch.ops._c10d_functional  # in place in no graph, and known to torch.compile
        out = self.part(*args, **kwargs).contiguous()
        total: Tensor = ops.wait_tensor(ops.all_reduce(out, "sum", self._group))
        return total


def shard(model: PreTrainedModel, ranks: Ranks) -> PreTrainedModel:
    """Cuts a model to the share of one rank, in place; returns it.

    Norms, embeddings and the head stay whole on each rank. Key and value heads are divided, or
    each is on several ranks where there are fewer than these.

    Args:
        model: whole, the same on each rank.
        ranks: who takes part; with one there is nothing to do.

    Raises:
        ModelRefused: transformers has no plan for it, or one that is not understood here, or its
            heads or features cannot be divided by the ranks; the model is as it was.
    """
    if ranks.count == 1:
        return model
    cuts = _cuts(model)
    _check_sizes(model, ranks, cuts)
    for name, style in cuts.items():
        if style != "moe_tp_experts":
            _cut(model, name, style, ranks)
    for name, style in cuts.items():
        module = _module(model, name)
        if style == "moe_tp_experts" or (style == "rowwise" and module is not None):
            assert module is not None
            _replace(model, name, Summed(module, ranks.group))
    for each in model.modules():
        if hasattr(each, "num_key_value_groups"):  # of eager attention
            each.num_key_value_groups = _local_groups(model, ranks)  # type: ignore[assignment]
    return model


def _cuts(model: PreTrainedModel) -> dict[str, str]:
    """Modules and parameters that are cut, by their names, and how."""
    plan = dict(model.tp_plan)
    if not plan or all(style in _KEPT for style in plan.values()):
        raise _refused(model, "that transformers has a plan for (tp_plan)", "none")
    patterns = {re.compile(re.escape(name).replace(r"\*", r"\d+")): plan[name] for name in plan}
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    found = {
        name: style for name in names for each, style in patterns.items() if each.fullmatch(name)
    }
    known = {"colwise", "rowwise", "packed_colwise", "moe_tp_experts", *_KEPT}
    if others := sorted({*found.values()} - known):
        raise _refused(model, f"whose plan is of {', '.join(sorted(known))}", ", ".join(others))
    return {name: style for name, style in found.items() if style not in _KEPT}


def _check_sizes(model: PreTrainedModel, ranks: Ranks, cuts: dict[str, str]) -> None:
    config = model.config.get_text_config()
    heads, kv_heads = config.num_attention_heads, _kv_heads(model)
    if heads % ranks.count or (kv_heads % ranks.count and ranks.count % kv_heads):
        wanted = f"whose heads can be divided by {ranks.count} ranks"
        raise _refused(model, wanted, f"{heads} heads and {kv_heads} of keys and values")
    for name, style in cuts.items():
        if style == "moe_tp_experts" or _is_kv(name):
            continue
        size = _weight(model, name).shape[_dim(style, _weight(model, name))]
        if size % (ranks.count * (2 if style == "packed_colwise" else 1)):
            wanted = f"whose features can be divided by {ranks.count} ranks"
            raise _refused(model, wanted, f"{size} of {name}")


def _cut(model: PreTrainedModel, name: str, style: str, ranks: Ranks) -> None:
    weight = _weight(model, name)
    dim, index, count = _dim(style, weight), ranks.rank, ranks.count
    if _is_kv(name) and (several := count // min(count, _kv_heads(model))) > 1:
        index, count = index // several, count // several
    halves = weight.data.chunk(2 if style == "packed_colwise" else 1, dim)
    parts = [half.chunk(count, dim)[index] for half in halves]
    weight.data = torch.cat(parts, dim).contiguous()
    module = _module(model, name)
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = weight.shape
        bias: Tensor | None = module.bias
        if bias is not None and style == "colwise":
            bias.data = bias.data.chunk(count)[index].clone()
        if bias is not None and style == "rowwise" and ranks.rank:
            bias.data.zero_()  # it is added once


def _module(model: nn.Module, name: str) -> nn.Module | None:
    return dict(model.named_modules()).get(name)


def _weight(model: nn.Module, name: str) -> nn.Parameter:
    return model.get_parameter(name if _module(model, name) is None else f"{name}.weight")


def _dim(style: str, weight: Tensor) -> int:
    """The dimension that is cut: of outputs, the one before the last, or of inputs, the last."""
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


def _refused(model: PreTrainedModel, wanted: str, got: str) -> ModelRefused:
    return ModelRefused(
        f"expected a model {wanted}, got {type(model).__name__} with {got}: serve it in one "
        "process, or with another number of ranks"
    )
