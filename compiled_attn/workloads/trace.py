"""Reads request traces in the Azure (CSV) and Mooncake (JSON lines) formats."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TextIO

from compiled_attn.errors import TraceError
from compiled_attn.workloads.arrival import HASH_BLOCK, LONGEST, Arrival
from graphs.errors import parse_json, quoted

__all__ = ["TraceError", "read_trace"]

_COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")


def read_trace(path: str | Path, limit: int | None = None) -> list[Arrival]:
    """Read the first ``limit`` requests of a trace, by default all.

    The file is CSV with columns ``arrival_s``, ``prompt_tokens`` and ``output_tokens`` (Azure), or
    has one JSON object per line with these keys and optionally ``hash_ids`` and ``hash_block``
    (Mooncake). Blank lines and other keys are skipped.

    Raises:
        TraceError: the file cannot be read, has no request, or has a bad line: missing columns,
            values that are not numbers, lengths below 1, arrivals out of order.
        ValueError: ``limit`` is below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    arrivals: list[Arrival] = []
    try:
        with open(path, encoding="utf-8-sig") as file:
            for arrival in _parse(file, path):
                arrivals.append(arrival)
                if len(arrivals) == limit:
                    break
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: is not a text file; expected CSV or JSON lines") from error
    if not arrivals:
        raise TraceError(f"{path}: has no request; expected CSV or JSON lines")
    return arrivals


def _parse(file: TextIO, path: str | Path) -> Iterator[Arrival]:
    read_row: Callable[[str], Mapping[str, object]] | None = None
    last = 0.0
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            if read_row is None and not line.lstrip().startswith("{"):
                read_row = _csv_reader(line)
                continue
            read_row = read_row or _json_row
            arrival = _arrival(read_row(line))
            if arrival.arrival_s < last:
                raise ValueError(
                    f"arrival_s {arrival.arrival_s:g} is before {last:g}; sort the trace"
                )
        except ValueError as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
        last = arrival.arrival_s
        yield arrival


def _csv_reader(header: str) -> Callable[[str], Mapping[str, object]]:
    names = _cells(header)
    _require_columns(names)

    def read_row(line: str) -> Mapping[str, object]:
        cells = _cells(line)
        if len(cells) != len(names):
            raise ValueError(f"expected {len(names)} values, got {len(cells)}")
        return dict(zip(names, map(_number_or_text, cells), strict=True))

    return read_row


def _cells(line: str) -> list[str]:
    return [cell.strip().strip('"') for cell in line.split(",")]


def _number_or_text(cell: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return cell


def _json_row(line: str) -> Mapping[str, object]:
    row = parse_json(line)
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {quoted(row)}")
    _require_columns(row)
    return row


def _require_columns(names: Collection[str]) -> None:
    missing = [name for name in _COLUMNS if name not in names]
    if missing:
        raise ValueError(f"missing {', '.join(missing)}; expected {', '.join(_COLUMNS)}")


def _arrival(row: Mapping[str, object]) -> Arrival:
    prompt_tokens = _length(row["prompt_tokens"], "prompt_tokens")
    hash_block = _length(row.get("hash_block", HASH_BLOCK), "hash_block")
    ids = row.get("hash_ids", [])
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError(f"hash_ids must be a list of integers from 0 on, got {quoted(ids)}")
    return Arrival(
        arrival_s=_seconds(row["arrival_s"]),
        prompt_tokens=prompt_tokens,
        output_tokens=_length(row["output_tokens"], "output_tokens"),
        prefix_ids=tuple(ids[: math.ceil(prompt_tokens / hash_block)]),
        hash_block=hash_block,
    )


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise ValueError(f"arrival_s must be seconds from 0 on, got {quoted(value)}")
    return float(value)


def _length(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number from 1 on, got {quoted(value)}")
    if value > LONGEST:
        raise ValueError(f"{name} must be at most {LONGEST:,}, got {quoted(value)}")
    return value
