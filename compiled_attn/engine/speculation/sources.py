"""Makes the drafter of a configuration, and its source of drafts."""

from __future__ import annotations

from compiled_attn.engine.config import EngineConfig
from compiled_attn.engine.executor import Executor
from compiled_attn.engine.speculation.drafter import Drafter, DraftSource, Ngrams
from compiled_attn.engine.speculation.setting import Speculation

__all__ = ["drafter_of", "source_of"]


def drafter_of(executor: Executor, config: EngineConfig) -> Drafter | None:
    """Returns the drafter of an engine; None: no drafts.

    Raises:
        ConfigError: see `DraftModel.beside`.
    """
    if (speculation := config.speculation) is None:
        return None
    return Drafter(source_of(executor, config, speculation), speculation.most)


def source_of(executor: Executor, config: EngineConfig, speculation: Speculation) -> DraftSource:
    """Returns the source of drafts; errors: see `drafter_of`."""
    if speculation.model is None:
        return Ngrams()
    from compiled_attn.engine.speculation.draft_model import DraftModel  # loads transformers

    return DraftModel.beside(executor, config)
