"""Files of demands: JSON lines, as an engine records them step by step, or CSV."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import numpy as np

from graphs.buckets.axes import whole
from graphs.errors import DemandFileError, clipped, parse_json, quoted
from graphs.planner.demand import Demand

__all__ = ["read_demand"]

_COUNT = "count"
_LONGEST = 300  # characters of a reason

Row = tuple[dict[str, int], float]


def read_demand(path: str | os.PathLike[str]) -> Demand:
    """Read the needs of a file, in its order.

    A file that begins with ``{`` has one object a line, ``{"need": {"tokens": 37, "blocks": 80},
    "count": 2}``, or just the sizes, ``{"tokens": 37, "blocks": 80}``; any other is CSV with a line
    of names first: the axes, and perhaps ``count``. A count is a positive number, 1 where it is
    left out. Blank lines are skipped.

    Raises:
        DemandFileError: the file cannot be read, holds no need, or has a bad line: its number and
            the reason are in the message.
    """
    needs: list[list[int]] = []
    counts: list[float] = []
    names: tuple[str, ...] = ()
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, (need, count) in _rows(file, path):
                names = names or tuple(need)
                if set(need) != set(names):
                    expected, got = (clipped(", ".join(each), 80) for each in (names, need))
                    raise DemandFileError(
                        f"{path}:{number}: expected the axes {expected} of the first need, got "
                        f"{got}: one file holds one set of axes"
                    )
                needs.append([need[name] for name in names])
                counts.append(count)
    except (OSError, UnicodeDecodeError) as error:
        raise DemandFileError(f"{path}: not readable as a demand: {error}") from error
    if not needs:
        raise DemandFileError(f"{path}: holds no need; expected JSON lines or CSV, one need a line")
    try:
        return Demand(names, np.array(needs, np.int64), counts)
    except (ValueError, OverflowError) as error:
        raise DemandFileError(f"{path}: {clipped(str(error), _LONGEST)}") from None


def _rows(file: TextIO, path: str | os.PathLike[str]) -> Iterator[tuple[int, Row]]:
    read: Callable[[str], Row] | None = None
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            if read is None and not line.lstrip().startswith("{"):
                read = _csv_reader(line)
                continue
            read = read or _json_row
            yield number, read(line)
        except (TypeError, ValueError) as error:
            if isinstance(error, DemandFileError):
                raise
            problem = clipped(str(error), _LONGEST)
            raise DemandFileError(f"{path}:{number}: {problem}: {quoted(line.strip())}") from None


def _json_row(line: str) -> Row:
    row = parse_json(line)
    if not isinstance(row, dict) or not row:
        raise ValueError('expected sizes by axis, such as {"tokens": 37}, or {"need": {...}}')
    need, count = (row["need"], row.get(_COUNT, 1)) if "need" in row else (row, 1)
    if not isinstance(need, dict) or not need:
        raise ValueError('expected an object with "need": {axis: size, ...}')
    return {name: _size(name, size) for name, size in need.items()}, _checked_count(count)


def _csv_reader(header: str) -> Callable[[str], Row]:
    names = [name.strip() for name in header.split(",")]
    if len(set(names)) != len(names) or not all(name.isidentifier() for name in names):
        raise ValueError("expected the names of the axes, each once, or an object in braces")

    def read(line: str) -> Row:
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(names):
            raise ValueError(f"expected {len(names)} values, got {len(cells)}")
        row = dict(zip(names, cells, strict=True))
        count = _checked_count(float(row.pop(_COUNT, "1")))
        return {name: _size(name, int(cell)) for name, cell in row.items()}, count

    return read


def _size(name: str, size: Any) -> int:
    if isinstance(size, bool):
        raise TypeError(f"{name}={size!r} is not a whole number; sizes are ints")
    if (number := whole(name, size)) >= 2**63:
        raise ValueError(f"{name} is beyond 64 bits; sizes are below {2**63}")
    return number


def _checked_count(count: Any) -> float:
    if isinstance(count, bool) or not isinstance(count, int | float) or not 0 < count < math.inf:
        raise ValueError(f"expected a positive count, got {count!r}")
    return float(count)
