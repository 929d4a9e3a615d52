"""Single values and tables of a report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Table", "facts", "number", "tables"]

_CHARTS = ("series",)


class Cell(NamedTuple):
    """Text of a table cell, and whether it is a number."""

    text: str
    is_number: bool


class Table(NamedTuple):
    """A named table; one without columns has no header."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def facts(report: Mapping[str, Any]) -> list[tuple[str, Cell]]:
    """The single values of a report, by name."""
    return [
        (_words(name), _cell(value))
        for name, value in report.items()
        if not isinstance(value, Mapping | list | tuple)
    ]


def tables(report: Mapping[str, Any]) -> Iterator[Table]:
    """A table for each mapping and each list; a list of mappings has a column per key."""
    for name, value in report.items():
        if name in _CHARTS or not value:
            continue
        if isinstance(value, Mapping):
            pairs = ((_words(key), item) for key, item in value.items())
            yield Table(_heading(name), (), tuple(map(_row, pairs)))
        elif isinstance(value, list | tuple):
            yield _of_list(_heading(name), value)


def number(value: float | int | None) -> str:
    """Format a value with few digits: 1,234, 12.3, 0.0042; a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    digits = min(6, max(0, 2 - math.floor(math.log10(abs(value)))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if digits else text


def _of_list(name: str, values: Sequence[Any]) -> Table:
    if not all(isinstance(value, Mapping) for value in values):
        return Table(name, (), tuple(_row((value,)) for value in values))
    columns = tuple(dict.fromkeys(key for value in values for key in value))
    rows = tuple(_row([value.get(column, "") for column in columns]) for value in values)
    return Table(name, tuple(map(_words, columns)), rows)


def _row(values: Sequence[Any]) -> tuple[Cell, ...]:
    return tuple(map(_cell, values))


def _cell(value: Any) -> Cell:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Cell(number(value), True)
    return Cell(_flat(value), False)


def _flat(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_flat(item)}" for key, item in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return number(value)
    return number(None) if value is None else str(value)


def _heading(name: object) -> str:
    words = "buckets in numbers" if name == "buckets" else _words(name)
    return words[:1].upper() + words[1:]


def _words(name: object) -> str:
    return str(name).replace("_", " ")
