"""Facts that all ranks must have alike, and the sizes on which they agree."""

from __future__ import annotations

import importlib.metadata
import platform
import zlib
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from compiled_attn.engine import EngineConfig
from compiled_attn.engine.kernel import chosen_kernel
from compiled_attn.engine.sizing import Sizing
from compiled_attn.ranks.context import ContextExecutor
from compiled_attn.ranks.engine import RankEngine
from compiled_attn.ranks.executor import RankExecutor
from compiled_attn.ranks.group import Ranks
from compiled_attn.ranks.shard import shard

__all__ = ["engine_on"]

_OWN = "num_blocks", "backend", "buckets", "warmup_workers", "warmup_journal", "prefix_key"
_SAMPLE = 1 << 16  # bytes of each weight that are compared


def engine_on(
    ranks: Ranks,
    model: PreTrainedModel,
    config: EngineConfig | None = None,
    *,
    context_parallel: bool = False,
    **others: Any,
) -> RankEngine:
    """An engine on several ranks; each calls this, with the same model and settings.

    The cache of each rank is as large as that of the smallest.

    Args:
        ranks: who takes part.
        model: whole; it is cut to the share of this rank, unless contexts are divided.
        config: of the engine; sizes of the cache are those of one rank.
        context_parallel: each rank has all weights, and some blocks of every request, so that a
            prompt may be longer than the cache of one; see `ContextExecutor`.
        others: as of `compiled_attn.engine.Engine`.

    Raises:
        ConfigError: another rank has another model, other settings or versions.
        ModelRefused: the model cannot be cut, see `shard`, or has windows and contexts are to be
            divided; or cannot run on a paged cache.
        RankLost: a rank has ended.
    """
    config = config or EngineConfig()
    ranks.same(_facts(model, config) | {"setting context_parallel": str(context_parallel)})
    executor = ContextExecutor if context_parallel else RankExecutor
    with ranks.calling():
        if not context_parallel:
            shard(model, ranks)
        if config.num_blocks is None:
            among = ranks.count if context_parallel else 1
            sizing = Sizing.of(model, config, chosen_kernel(model, config).layout, among)
            own = 1 + (sizing.num_blocks - 1) // among
            config = replace(config, num_blocks=ranks.least(own), kv_memory=None)
        return RankEngine(ranks, executor(ranks, model, config), **others)


def _facts(model: PreTrainedModel, config: EngineConfig) -> dict[str, str]:
    settings = {
        f"setting {each.name}": str(getattr(config, each.name))
        for each in fields(config)
        if each.name not in _OWN
    }
    packages = ("compiled-attn", "torch", "transformers")
    versions = {f"version of {name}": importlib.metadata.version(name) for name in packages}
    return {
        "model": type(model).__name__,
        "weights": _sum_of(model),
        "backend": config.backend_name,
        "buckets": "; ".join(map(str, config.buckets or ())) or "a ladder",
        "version of python": platform.python_version(),
        **settings,
        **versions,
    }


def _sum_of(model: nn.Module) -> str:
    """A checksum of the names, shapes and first bytes of all weights and buffers."""
    total = 0
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        first = weight.detach().reshape(-1)[:_SAMPLE].cpu().contiguous().view(torch.uint8)
        total = zlib.crc32(f"{name} {weight.dtype} {[*weight.shape]}".encode(), total)
        total = zlib.crc32(first.numpy().tobytes(), total)
    return f"{total:08x}"
