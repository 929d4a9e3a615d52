"""The executor of one rank of several that keep a context together: whole weights, some blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from compiled_attn.engine.config import ConfigError, EngineConfig
from compiled_attn.engine.local import LocalExecutor
from compiled_attn.engine.sizing import Sizing
from compiled_attn.errors import ModelRefused
from compiled_attn.models.hf.shapes import calls_by_layer
from compiled_attn.ranks.executor import RankExecutor
from compiled_attn.ranks.group import Ranks
from compiled_attn.step import BlockShare, DividedTableLayout

__all__ = ["ContextExecutor"]


class ContextExecutor(RankExecutor):
    """Computes every step with all weights, and attends to the keys of one rank.

    The pool is of the blocks of all ranks, and they decide alike who gets which; a block lies on
    one of them, see `compiled_attn.step.BlockShare`. Prompts share whole blocks. What would copy
    blocks from rank to rank is off: the beginnings of blocks are not shared, and blocks not moved.

    Args:
        ranks: who takes part.
        model: whole.
        config: the same on each rank; ``num_blocks`` are those of one rank.

    Raises:
        ConfigError: there is no native kernel here; or see `LocalExecutor`.
        ModelRefused: a layer sees a window of its context.
    """

    def __init__(self, ranks: Ranks, model: PreTrainedModel, config: EngineConfig) -> None:
        self._share, self._group = BlockShare(ranks.rank, ranks.count), ranks.group
        _refuse_windows(model)
        super().__init__(ranks, model, replace(config, defrag_waste=1))

    def finite_blocks(self, places: NDArray[np.int64]) -> int:
        """See `LocalExecutor.finite_blocks`; the same on every rank."""
        own = np.flatnonzero(self._share.has(places))
        found = LocalExecutor.finite_blocks(self, self._share.local(places[own]).astype(np.int64))
        return self.ranks.least(int(own[found]) if found < len(own) else len(places))

    def _sizing_of(self, model: PreTrainedModel) -> Sizing:
        if self.kernel.name != "native":
            raise ConfigError(
                f"context parallel is for the native kernel, got {self.kernel.name} "
                f"({self.kernel.notes['native']}): take kernel 'auto', or divide the weights"
            )
        sizing = Sizing.of(model, self.config, self.kernel.layout, self._share.count)
        layout = DividedTableLayout(
            sizing.num_blocks, sizing.block_size, sizing.table_width, self._share, self._group
        )
        return replace(sizing, layout=layout)


def _refuse_windows(model: PreTrainedModel) -> None:
    windows = sorted({call.window for call in calls_by_layer(model) if call.window})
    if windows:
        raise ModelRefused(
            f"expected a model whose layers see all of their context, got {type(model).__name__} "
            f"with windows of {windows} tokens: divide its weights instead (leave "
            "context_parallel, --context-parallel, out)"
        )
