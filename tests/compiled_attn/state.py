"""The complete state of an object as plain values, to show that a call changed nothing."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np


def state_of(thing: Any) -> Any:
    """Every attribute, entry and order (of dicts, too) below ``thing``, by value."""
    if thing is None or isinstance(thing, (bool, int, float, str, bytes)):
        return thing
    if isinstance(thing, (array, bytearray)):
        return type(thing).__name__, thing[:]
    if isinstance(thing, np.ndarray):
        return thing.dtype.str, thing.shape, thing.tobytes()
    if isinstance(thing, Mapping):
        return [(key, state_of(value)) for key, value in thing.items()]
    if isinstance(thing, (list, tuple)):
        return [state_of(item) for item in thing]
    if isinstance(thing, (set, frozenset)):
        return sorted(thing)
    slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    names = [*getattr(thing, "__dict__", {}), *slots]
    if not names:
        raise TypeError(f"expected an object with attributes, got {thing!r}: teach state_of")
    return type(thing).__name__, [(name, state_of(getattr(thing, name))) for name in names]
