"""The facts of a run: model, dtype, options, and the machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphs.report.surroundings import surroundings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["RunFacts"]

_PACKAGES = ("transformers", "numpy", "compiled-attn")


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The facts of a run that stand beside its numbers in the JSON and in the report.

    Args:
        model: `class`, `source` (its directory, or "default") and number of `parameters`.
        dtype: of its weights.
        date: when the run began, UTC.
        threads: that torch computes with.
        options: of the command, with their values; None where one was not given.
        machine: see `graphs.report.surroundings`.
        versions: of Python and of the packages that compute; None for one that is not installed.
    """

    model: dict[str, Any]
    dtype: str
    date: str
    threads: int
    options: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str | None]

    @staticmethod
    def of(model: PreTrainedModel, source: Path | None, options: Mapping[str, Any]) -> RunFacts:
        """The facts of a run of now.

        Args:
            model: that is served.
            source: its directory; None: the default model.
            options: of the command, by name.
        """
        return RunFacts(
            model={
                "class": type(model).__name__,
                "source": "default" if source is None else os.fspath(source),
                "parameters": sum(weight.numel() for weight in model.parameters()),
            },
            dtype=str(model.dtype).removeprefix("torch."),
            options={name: _plain(value) for name, value in options.items()},
            **surroundings(_PACKAGES),
        )


def _plain(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, Path) else value
