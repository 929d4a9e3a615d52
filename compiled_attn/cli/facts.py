"""Facts of a run for its report: model, dtype, options, machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphs.report.surroundings import surroundings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["facts_of"]

_PACKAGES = ("transformers", "numpy", "compiled-attn")


def facts_of(model: PreTrainedModel, options: Mapping[str, Any], waiting: str) -> dict[str, Any]:
    """Collects the facts of a run that begins now, as JSON-able values.

    Args:
        model: that runs.
        options: of the command, by name; ``model`` is its directory, None for the default model.
        waiting: how threads wait for each other, see `compiled_attn.waiting`.

    Returns:
        ``model`` (its ``class``, ``source`` and number of ``parameters``), ``dtype`` of its
        weights, ``options``, ``waiting``, and `graphs.report.surroundings`: ``date``,
        ``threads``, ``machine``, ``versions``.
    """
    plain = {name: _plain(value) for name, value in options.items()}
    return {
        "model": {
            "class": type(model).__name__,
            "source": plain["model"] or "default",
            "parameters": sum(weight.numel() for weight in model.parameters()),
        },
        "dtype": str(model.dtype).removeprefix("torch."),
        "options": plain,
        "waiting": waiting,
        **surroundings(_PACKAGES),
    }


def _plain(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, Path) else value
