"""Makes the drafter of a configuration."""

from __future__ import annotations

from compiled_attn.engine.config import EngineConfig
from compiled_attn.engine.executor import Executor
from compiled_attn.engine.speculation.drafter import Drafter, Ngrams

__all__ = ["drafter_of"]


def drafter_of(executor: Executor, config: EngineConfig) -> Drafter | None:
    """Returns the drafter of an engine; None: no drafts.

    Raises:
        ConfigError, compiled_attn.models.ModelError: see `DraftModel.beside`.
    """
    speculation = config.speculation
    if speculation is None:
        return None
    if speculation.model is None:
        return Drafter(Ngrams(), speculation.most)
    from compiled_attn.engine.speculation.draft_model import DraftModel  # loads transformers

    return Drafter(DraftModel.beside(executor, config, speculation.model), speculation.most)
