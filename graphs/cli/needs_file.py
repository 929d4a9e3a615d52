"""Reads recorded needs: a JSON object of sizes a line, in the order in which they occurred."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from graphs.cli.errors import UserError

__all__ = ["read_needs"]


def read_needs(path: Path) -> list[dict[str, int]]:
    """The needs of a file with lines such as `{"rows": 3, "length": 17}`.

    Raises:
        UserError: the file cannot be read, has no need, or a line is bad (with its number).
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not readable as recorded needs: {error}") from error
    needs = list(_needs(path, lines))
    if not needs:
        raise UserError(f'{path}: no need in it; expected a line such as {{"rows": 3}} for each')
    return needs


def _needs(path: Path, lines: list[str]) -> Iterator[dict[str, int]]:
    axes: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            need = json.loads(line)
        except ValueError:
            need = None
        if not isinstance(need, dict) or not need or not all(map(_is_size, need.values())):
            raise UserError(
                f'{path}:{number}: expected sizes by name, such as {{"rows": 3}}, got {line[:60]!r}'
            )
        axes = axes or set(need)
        if set(need) != axes:
            raise UserError(
                f"{path}:{number}: expected the axes {', '.join(sorted(axes))} as before, got "
                f"{', '.join(sorted(need))}"
            )
        yield need


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 0
