"""Labels of artifacts, for people who list a store; not part of a key, and no loss if damaged."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from graphs.files import read_json

__all__ = ["Label", "describe", "write_label"]

_FILE = "about.json"
_MOST = 80


@dataclass(frozen=True)
class Label:
    """A short description; an empty text or None where an older version stored the artifact.

    Attributes:
        model: what was captured: its class, and how many parameters it has.
        name: of the graph, with its bucket if it has one, such as `step[tokens=16]`.
        made: when it was stored, in seconds since the epoch.
    """

    model: str = ""
    name: str = ""
    made: float | None = None

    @classmethod
    def read(cls, folder: Path) -> Label:
        """The label of the entry in a folder."""
        try:
            written = read_json(folder / _FILE)
        except (OSError, ValueError):
            return cls()
        if not isinstance(written, dict):
            return cls()
        made = written.get("made")
        is_time = isinstance(made, float) and math.isfinite(made)
        return cls(
            _line(written.get("model")), _line(written.get("name")), made if is_time else None
        )


def write_label(folder: Path, about: Mapping[str, str]) -> None:
    """Write the label of an entry that is being made in a folder."""
    # Not synced: a crash that costs it costs nothing else.
    text = json.dumps({"model": "", "name": "", **about, "made": time.time()})
    (folder / _FILE).write_text(text, "utf-8")


def describe(function: Callable[..., Any], name: str) -> dict[str, str]:
    """The `model` and `name` of what is captured."""
    return {"model": _model(function), "name": name}


def _model(function: Callable[..., Any]) -> str:
    if not isinstance(function, nn.Module):
        return getattr(function, "__name__", type(function).__qualname__)
    count = _parameters(function)
    around = [child for child in function.children() if count and _parameters(child) == count]
    of = f" of {type(around[0]).__qualname__}" if len(around) == 1 else ""
    return f"{type(function).__qualname__}{of}, {_short(count)} parameters"


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _short(count: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def _line(text: Any) -> str:
    # It goes to a terminal, to which some characters are commands.
    shown = str(text)[:_MOST] if isinstance(text, str) else ""
    return "".join(char if char.isprintable() else "?" for char in shown)
