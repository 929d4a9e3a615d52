"""Explains misses of a store: the nearest entry, and the factors in which it differs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from graphs.store.entry import Entry
from graphs.store.store import ArtifactStore

__all__ = ["Misses"]

_log = logging.getLogger(__name__)

# Factors of the graph itself weigh more than those of its environment.
_WEIGHTS = {"inputs": 32, "part": 32, "state": 32, "values": 16}
_MAX_FACTORS, _MAX_CHARS = 6, 60


@dataclass(frozen=True)
class Miss:
    """A graph that a store did not have.

    Attributes:
        name: name of the graph.
        entry: key of the nearest entry, empty if there is none.
        differs: stored and current value of each factor that differs, None if it is absent; parts
            of mappings and lists are listed separately, as `sources.my_module`.
    """

    name: str
    entry: str
    differs: Mapping[str, tuple[Any, Any]]

    @property
    def is_another_graph(self) -> bool:
        """Whether inputs or model differ, or there is no entry at all."""
        return not self.entry or not {"inputs", "part", "state"}.isdisjoint(map(_top, self.differs))

    def __str__(self) -> str:
        if not self.entry:
            return "the store has no graph of this kind yet"
        shown = list(self.differs.items())[:_MAX_FACTORS]
        parts = [f"{name}: {' -> '.join(_texts(*values))}" for name, values in shown]
        more = len(self.differs) - len(parts)
        rest = [f"and {more} more"] if more else []
        return f"the nearest entry, {self.entry[:12]}, differs in " + ", ".join(parts + rest)


class Misses:
    """Collects misses, and logs each reason once.

    Attributes:
        found: all misses so far.
    """

    def __init__(self) -> None:
        self.found: list[Miss] = []
        self._logged: set[frozenset[Any]] = set()

    def note(self, store: ArtifactStore, factors: Mapping[str, Any], name: str) -> None:
        """Find out why these factors have no entry, and log it unless it was logged before."""
        miss = nearest(store.entries(), factors, name)
        self.found.append(miss)
        reason = frozenset(
            (factor, *(() if _top(factor) in _WEIGHTS else _texts(*values)))
            for factor, values in miss.differs.items()
        )
        if reason in self._logged:
            return
        self._logged.add(reason)
        level = logging.INFO if miss.is_another_graph else logging.WARNING
        _log.log(level, "%s: not in the store: %s (logged once for all graphs)", name, miss)


def nearest(entries: Iterable[Entry], factors: Mapping[str, Any], name: str) -> Miss:
    """The entry of the same backend that differs least, the most recently used of several."""
    best: tuple[int, Entry, dict[str, tuple[Any, Any]]] | None = None
    for entry in entries:
        if entry.factors.get("backend") != factors.get("backend"):
            continue
        differs = differences(entry.factors, factors)
        far = sum({each: _WEIGHTS.get(each, 1) for each in map(_top, differs)}.values())
        if best is None or far < best[0]:
            best = far, entry, differs
    return Miss(name, best[1].key, best[2]) if best else Miss(name, "", {})


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Old and new values that differ, by name; None if absent."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in sorted(old.keys() | new.keys()):
        before, now = old.get(name), new.get(name)
        if isinstance(before, (Mapping, list)) and isinstance(now, (Mapping, list)):
            inner = differences(_parts(before), _parts(now))
            found |= {f"{name}.{part}": values for part, values in inner.items()}
        elif before != now:
            found[name] = before, now
    return found


def _top(name: str) -> str:
    return name.partition(".")[0]


def _parts(value: Mapping[str, Any] | list[Any]) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {str(i): each for i, each in enumerate(value)}


def _texts(old: Any, new: Any) -> tuple[str, str]:
    """Both values as short texts, cut to where they begin to differ."""
    texts = ["none" if value is None else str(value) for value in (old, new)]
    same = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), 0)
    start = max(0, same - _MAX_CHARS // 4) if max(map(len, texts)) > _MAX_CHARS else 0
    cut = [("..." if start else "") + text[start : start + _MAX_CHARS] for text in texts]
    return cut[0], cut[1]
