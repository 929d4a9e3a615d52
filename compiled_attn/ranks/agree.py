"""Creates an engine on several ranks, after checking that model, settings and versions agree."""

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
from compiled_attn.ranks.engine import RankEngine
from compiled_attn.ranks.executor import RankExecutor
from compiled_attn.ranks.group import Ranks

__all__ = ["engine_on"]

_PER_RANK = "num_blocks", "backend", "buckets", "warmup_journal", "prefix_key"
_SAMPLE = 1 << 16  # bytes of each weight that are compared


def engine_on(
    ranks: Ranks,
    model: PreTrainedModel,
    config: EngineConfig | None = None,
    *,
    executor: type[RankExecutor] = RankExecutor,
    **others: Any,
) -> RankEngine:
    """Create an engine on several ranks; each rank calls this with the same model and settings.

    The cache of each rank is as large as that of the smallest.

    Args:
        ranks: ranks of the process group.
        model: whole; `RankExecutor` shards it in place.
        config: configuration of the engine; cache sizes are per rank.
        executor: `RankExecutor` for tensor parallelism, or
            `compiled_attn.contrib.context_parallel.ContextExecutor`, which divides contexts.
        others: passed to `compiled_attn.engine.Engine`.

    Raises:
        ConfigError: another rank has another model, other settings or versions.
        ModelRefused: the model cannot be divided, see `shard` and `ContextExecutor`; or cannot run
            on a paged cache.
        RankLost: a rank exited.
    """
    config = config or EngineConfig()
    ranks.check_equal(_facts(model, config) | {"executor": executor.__name__})
    with ranks.guard():
        executor.divide(model, ranks)
        if config.num_blocks is None:
            among = executor.pool_ranks(ranks)
            sizing = Sizing.of(model, config, chosen_kernel(model, config).layout, among)
            own = 1 + (sizing.num_blocks - 1) // among
            config = replace(config, num_blocks=ranks.minimum(own), kv_memory=None)
        return RankEngine(ranks, executor(ranks, model, config), **others)


def _facts(model: PreTrainedModel, config: EngineConfig) -> dict[str, str]:
    settings = {
        f"setting {each.name}": str(getattr(config, each.name))
        for each in fields(config)
        if each.name not in _PER_RANK
    }
    packages = ("compiled-attn", "torch", "transformers")
    versions = {f"version of {name}": importlib.metadata.version(name) for name in packages}
    return {
        "model": type(model).__name__,
        "weights": _checksum(model),
        "backend": config.backend_name,
        "buckets": "; ".join(map(str, config.buckets or ())) or "a ladder",
        "version of python": platform.python_version(),
        **settings,
        **versions,
    }


def _checksum(model: nn.Module) -> str:
    total = 0
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        first = weight.detach().reshape(-1)[:_SAMPLE].cpu().contiguous().view(torch.uint8)
        total = zlib.crc32(f"{name} {weight.dtype} {[*weight.shape]}".encode(), total)
        total = zlib.crc32(first.numpy().tobytes(), total)
    return f"{total:08x}"
