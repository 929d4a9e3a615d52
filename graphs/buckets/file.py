"""Bucket files: one tuple of sizes per line, with ranges and lists; parsed, never evaluated.

For example:

    version: 1
    axes: tokens shared unique       # or in a comment, `# axes: ...`
    (1, 0, 8)
    range(32, 129, 32), 0, [8, 16]   # half-open as in Python; all combinations: eight buckets
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from graphs.buckets.space import BucketSpace
from graphs.errors import BucketFileError, clipped, quoted
from graphs.files import write_whole

__all__ = ["from_file", "to_file"]

_VERSION = 1
_MAX_BUCKETS = 100_000
_LONGEST = 300  # characters of a reason
_LONGEST_NAME = 80
_HEADER = re.compile(r"\s*(#?)\s*(axes|version)\s*:\s*(.*?)\s*$")
_TOKEN = re.compile(r"\s*(-?\d+\.\d*|-?\d+|\w+|\S)")


def from_file(path: str | os.PathLike[str]) -> BucketSpace:
    """Read a bucket file: a line `axes: <names>`, a line `version: 1`, and one tuple a line.

    A value is an int, `range(stop)`, `range(start, stop[, step])`, or a list of these in brackets;
    several values for an axis stand for all combinations. `#` begins a comment; the version
    defaults to 1.

    Raises:
        BucketFileError: the file cannot be read, a line is bad (with its number and the reason),
            the version is newer.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BucketFileError(f"{path}: not readable as a bucket file: {error}") from error
    names: list[str] = []
    rows: dict[tuple[int, ...], None] = {}
    for number, line in enumerate(lines, start=1):
        try:
            names = _read_line(line, names, rows)
        except ValueError as error:
            problem = clipped(str(error), _LONGEST)
            raise BucketFileError(f"{path}:{number}: {problem}: {quoted(line.strip())}") from None
    if not rows:
        raise BucketFileError(
            f"{path}: no bucket in it; expected `axes: <names>` and one tuple a line"
        )
    try:
        return BucketSpace(names, rows)
    except ValueError as error:
        raise BucketFileError(f"{path}: {clipped(str(error), _LONGEST)}") from None


def to_file(space: BucketSpace, path: str | os.PathLike[str]) -> None:
    """Write the buckets of `space` for :func:`from_file`, atomically.

    Costs and legal ranges are not written.

    Raises:
        OSError: the file cannot be written.
    """
    head = [f"version: {_VERSION}", f"axes: {' '.join(space.names)}"]
    rows = [f"({', '.join(map(str, bucket.sizes))})" for bucket in space]
    write_whole(Path(path), "\n".join([*head, *rows, ""]).encode())


def _read_line(line: str, names: list[str], rows: dict[tuple[int, ...], None]) -> list[str]:
    header = _HEADER.match(line)
    commented = bool(header and header[1])
    if header and header[2] == "version" and not rows:
        _check_version(header[3].split("#")[0].strip())
    elif header and header[2] == "axes" and not (commented and names):
        if names:
            raise ValueError("a second axes line; expected one")
        return _read_axes(header[3].split("#")[0])
    elif text := line.split("#")[0].strip():
        if not names:
            raise ValueError("sizes before the axes are named; expected `axes: <names>` first")
        _add_rows(_parse_tuple(text, len(names)), rows)
    return names


def _check_version(text: str) -> None:
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < 1:
        raise ValueError(f"version is {quoted(text)}; expected `version: {_VERSION}`")
    if int(text) > _VERSION:
        raise ValueError(f"version {text} is newer than {_VERSION}; update this library to read it")


def _read_axes(text: str) -> list[str]:
    names = text.replace(",", " ").split()
    if not names or len(set(names)) != len(names):
        raise ValueError("expected the axes' names after `axes:`, each once")
    if long := next((name for name in names if len(name) > _LONGEST_NAME), ""):
        raise ValueError(f"expected names of at most {_LONGEST_NAME} letters, got {len(long)}")
    return names


def _add_rows(columns: list[list[range]], rows: dict[tuple[int, ...], None]) -> None:
    counts = [sum(map(len, parts)) for parts in columns]
    if len(rows) + math.prod(counts) > _MAX_BUCKETS:
        raise ValueError(f"more than {_MAX_BUCKETS} buckets")
    rows.update(dict.fromkeys(itertools.product(*(itertools.chain(*parts) for parts in columns))))


def _parse_tuple(text: str, count: int) -> list[list[range]]:
    tokens = _Tokens(text)
    closing = tokens.accept("(")
    columns = [_parse_value(tokens)]
    while tokens.accept(","):
        if tokens.peek in (")", ""):
            break
        columns.append(_parse_value(tokens))
    if closing:
        tokens.expect(")")
    tokens.expect("")
    if len(columns) != count:
        raise ValueError(f"{len(columns)} sizes; expected {count}, one per axis")
    return columns


def _parse_value(tokens: _Tokens) -> list[range]:
    if not tokens.accept("["):
        return [_parse_range(tokens)]
    parts = [_parse_range(tokens)]
    while tokens.accept(","):
        if tokens.peek == "]":
            break
        parts.append(_parse_range(tokens))
    tokens.expect("]")
    return parts


def _parse_range(tokens: _Tokens) -> range:
    if not tokens.accept("range"):
        size = tokens.size()
        return range(size, size + 1)
    tokens.expect("(")
    bounds = [tokens.size()]
    while tokens.accept(","):
        bounds.append(tokens.size())
    tokens.expect(")")
    if len(bounds) > 3 or (len(bounds) == 3 and bounds[2] == 0):
        raise ValueError(
            "expected range(stop), range(start, stop) or range(start, stop, step >= 1)"
        )
    if not (values := range(*bounds)):
        raise ValueError(f"range{tuple(bounds)} is empty; the stop itself is not part of a range")
    return values


class _Tokens:
    def __init__(self, text: str) -> None:
        self._rest: Iterator[str] = iter(_TOKEN.findall(text))
        self.peek = next(self._rest, "")

    def accept(self, word: str) -> bool:
        if self.peek != word:
            return False
        self.peek = next(self._rest, "")
        return True

    def expect(self, word: str) -> None:
        if not self.accept(word):
            got = quoted(self.peek) if self.peek else "the end of the line"
            raise ValueError(f"expected {repr(word) if word else 'the end of the line'}, got {got}")

    def size(self) -> int:
        word = self.peek
        if not re.fullmatch(r"-?\d{1,12}", word, re.ASCII):
            got = quoted(word) if word else "the end of the line"
            raise ValueError(f"expected a whole number of at most 12 digits, got {got}")
        if word.startswith("-"):
            raise ValueError(f"size {word} is negative; sizes are at least 0")
        self.accept(word)
        return int(word)
