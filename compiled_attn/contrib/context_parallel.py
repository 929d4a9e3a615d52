"""Context parallelism: every rank has all weights, and some blocks of every request."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel

from compiled_attn.engine.config import ConfigError, EngineConfig
from compiled_attn.engine.sizing import Sizing
from compiled_attn.errors import ModelRefused
from compiled_attn.models.hf.shapes import calls_by_layer
from compiled_attn.ranks.executor import RankExecutor
from compiled_attn.ranks.group import Ranks
from compiled_attn.step import BlockShare, DividedTableLayout

__all__ = ["ContextExecutor"]


class ContextExecutor(RankExecutor):
    """Computes every step with all weights, and attends to the keys of its own blocks.

    A prompt may be longer than the cache of one rank. All ranks make the same allocations in one
    pool; each block is stored on one rank, see `compiled_attn.step.BlockShare`. Prefix reuse is of
    whole blocks and defragmentation is off, since both would copy blocks between ranks.

    Args:
        ranks: of the process group.
        model: whole.
        config: the same on each rank; ``num_blocks`` is per rank.

    Raises:
        ConfigError: there is no native kernel here; or see `LocalExecutor`.
        ModelRefused: a layer has a sliding window.
    """

    @classmethod
    def divide(cls, model: PreTrainedModel, ranks: Ranks) -> None:
        """Leave the model whole."""

    @classmethod
    def pool_ranks(cls, ranks: Ranks) -> int:
        """All ranks share one pool."""
        return ranks.count

    def __init__(self, ranks: Ranks, model: PreTrainedModel, config: EngineConfig) -> None:
        self._share, self._group = BlockShare(ranks.rank, ranks.count), ranks.group
        _refuse_windows(model)
        super().__init__(ranks, model, replace(config, defrag_waste=1))

    def _sizing_of(self, model: PreTrainedModel) -> Sizing:
        if self.kernel.name != "native":
            raise ConfigError(
                f"context parallel is for the native kernel, got {self.kernel.name} "
                f"(native: {self.kernel.notes['native']}): use kernel 'auto', or tensor parallelism"
            )
        sizing = super()._sizing_of(model)
        layout = DividedTableLayout(
            sizing.num_blocks, sizing.block_size, sizing.table_width, self._share, self._group
        )
        return replace(sizing, layout=layout)


def _refuse_windows(model: PreTrainedModel) -> None:
    windows = sorted({call.window for call in calls_by_layer(model) if call.window})
    if windows:
        raise ModelRefused(
            f"expected a model without sliding windows, got {type(model).__name__} "
            f"with windows of {windows} tokens: use tensor parallelism (omit --context-parallel)"
        )
