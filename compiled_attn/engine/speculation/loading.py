"""Loads the model that drafts for another one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_attn.errors import ConfigError
from compiled_attn.models.load import load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["load_draft"]


def load_draft(folder: str, large: PreTrainedModel) -> PreTrainedModel:
    """Loads a model to draft for another one, in its dtype and on its device.

    Raises:
        ConfigError: the vocabularies differ.
        compiled_attn.models.ModelError: it cannot be loaded.
    """
    model = load_model(folder, dtype=large.dtype, device=large.device)
    found, expected = (each.config.get_text_config().vocab_size for each in (model, large))
    if found != expected:
        raise ConfigError(
            f"expected a draft model with the model's vocabulary of {expected} tokens, got one of "
            f"{found}: take one of the same family"
        )
    return model
