"""Rotary embeddings that change with the longest sequence of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedModel

__all__ = ["context_limit"]


def context_limit(model: PreTrainedModel) -> int | None:
    """Longest prompt plus generation that the model can serve; None: its configuration has none.

    That is ``max_position_embeddings``. Types "dynamic" and "longrope" rotate *all* tokens of a
    step differently as soon as one of them is beyond the length that they were trained with: there
    a long request would change the others, so it is that length.
    """
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    limits = [limit] if limit and limit > 0 else []
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        kind = rope.get("rope_type", "default")
        trained = rope.get("original_max_position_embeddings") or limit
        if trained and ("dynamic" in kind or kind == "longrope"):
            limits.append(trained)
    return min(map(int, limits), default=None)


def _ropes(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """The parameters of each kind of layer, or those of all layers."""
    if not isinstance(parameters, Mapping):
        return
    if "rope_type" in parameters:
        yield parameters
    for nested in parameters.values():
        yield from _ropes(nested)
