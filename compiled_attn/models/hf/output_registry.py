"""Keeps graphs valid when models of other classes are made after their capture.

The forward of each transformers model looks up what its class can record in one dictionary of all
classes. Dynamo guards its length, so a later model of a new class would make every graph stale.
"""

from __future__ import annotations

import sys
from typing import Any

from transformers import PreTrainedModel

__all__ = ["use_own_entries"]

_MODULE, _NAME = "transformers.utils.output_capturing", "_CAN_RECORD_REGISTRY"


class _Entries:
    """Stands for the dictionary where it is read: each class is an attribute of its own."""

    def __init__(self, registry: Any) -> None:
        self._registry = registry

    def get(self, model: Any) -> Any:
        """Returns the entry of a model, or of the name of its class, as versions before 5.24."""
        key = model if isinstance(model, str) else str(model.__class__)
        found = getattr(self, _attribute(key), None)
        return self._registry.get(model) if found is None else found


def use_own_entries(model: PreTrainedModel) -> None:
    """Makes the classes in a model read their entries alone, in this process."""
    module = sys.modules.get(_MODULE)
    entries = getattr(module, _NAME, None)
    if entries is None:  # another version of transformers
        return
    if not isinstance(entries, _Entries):
        entries = _Entries(entries)
        setattr(module, _NAME, entries)
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            key = _attribute(str(part.__class__))
            vars(entries).setdefault(key, part._can_record_outputs or {})


def _attribute(key: str) -> str:
    return key.replace(".", "/")  # Dynamo has no source for a name with a dot
