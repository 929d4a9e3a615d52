"""The file of late work: what compiled after a warmup, for the next one to take.

One JSON object per line, in a form that several processes may append to. Lines have names of code,
sizes and types; neither contents of tensors nor values of text and floating point numbers.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Self, cast, get_args

from graphs.errors import LateFileError, parse_json, quoted
from graphs.watch.causes import CompileEvent, Kind

__all__ = ["LateFile", "LateWork", "read_late"]

_log = logging.getLogger(__name__)

_HEAD = {"form": "graphs late work", "version": 1}
_OF_A_BUCKET = re.compile(r"^(?P<name>.+)\[(?P<sizes>\w+=\d+(?: \w+=\d+)*)\]$")
_VALUE = re.compile(r"\s+is no longer\s.*", re.DOTALL)


@dataclass(frozen=True)
class LateWork:
    """Something that compiled late.

    Attributes:
        kind, function, file, line, reason, remedy: as of a :class:`~graphs.CompileEvent`; values
            are left out of the reason.
        call: the call to repeat, see :mod:`graphs.watch.calls`, or None.
        name, need: of a captured graph of a bucket: the name of its manager, and the sizes by axis.
    """

    kind: Kind
    function: str
    file: str = ""
    line: int = 0
    reason: str = ""
    remedy: str = ""
    call: Mapping[str, Any] | None = field(default=None, hash=False)
    name: str = ""
    need: Mapping[str, int] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, event: CompileEvent) -> Self:
        """What to remember of an event."""
        bucket = None if event.file else _OF_A_BUCKET.search(event.function)
        name, need = "", {}
        if bucket is not None:
            pairs = (pair.split("=") for pair in bucket["sizes"].split())
            name, need = bucket["name"], {axis: int(size) for axis, size in pairs}
        where = (event.kind, event.function, event.file, event.line)
        return cls(*where, _without_values(event.reason), event.remedy, event.call, name, need)

    @property
    def key(self) -> str:
        """Equal for the same work."""
        if self.call is not None:  # a compile in one run may be a recompile in the next
            return json.dumps([self.file, self.line, self.call], sort_keys=True)
        if self.need:
            return json.dumps([self.name, self.need], sort_keys=True)
        return json.dumps([self.kind, self.function, self.file, self.line, self.reason])

    def __str__(self) -> str:
        thread = 0
        return str(
            CompileEvent(self.kind, self.function, self.file, self.line, self.reason, thread)
        )


class LateFile:
    """Appends late work to a file, the same work once.

    Args:
        path: the file, which is made when the first line is written.

    Raises:
        LateFileError: the file is another one, or malformed.
        OSError: it cannot be read, or its folder does not exist.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = Path(path)
        if not self._path.parent.is_dir():
            raise FileNotFoundError(f"{self._path.parent} is no folder: make it first")
        self._known = {work.key for work in read_late(self._path)} if self._path.exists() else set()
        self._is_broken = False

    def append(self, event: CompileEvent) -> None:
        """Append what an event says, unless it is there already."""
        work = LateWork.of(event)
        if work.key in self._known:
            return
        self._known.add(work.key)
        entry = {
            name: value for name, value in vars(work).items() if value not in ("", 0, None, {})
        }
        try:
            with self._path.open("ab", buffering=0) as file:
                head = b"" if file.tell() else json.dumps(_HEAD).encode() + b"\n"
                file.write(head + json.dumps(entry).encode() + b"\n")
        except OSError as error:  # a full disk must not stop the program
            if not self._is_broken:
                _log.warning("late work is not recorded any more: %s", error)
            self._is_broken = True


def read_late(path: str | PathLike[str]) -> list[LateWork]:
    """Read a file of late work; a last line without an end, of a process that died, is ignored.

    Raises:
        LateFileError: it is malformed; the message begins with `path:line:`.
        OSError: it cannot be read.
    """
    found: dict[str, LateWork] = {}
    for number, line in _lines(Path(path)):
        try:
            entry = parse_json(line)
            if not isinstance(entry, dict):
                raise ValueError(f"expected an object, got {quoted(entry)}")
            if "form" in entry or number == 1:  # each process that began the file wrote one
                _check_head(entry)
                continue
            work = _checked(entry)
        except ValueError as error:
            raise LateFileError(f"{path}:{number}: {error}") from None
        found.setdefault(work.key, work)
    return [*found.values()]


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if data and not whole:
        raise LateFileError(f"{path}:1: expected a file of late work: give another path")
    yield from enumerate(whole.splitlines(), start=1)


def _check_head(entry: Mapping[str, Any]) -> None:
    if entry.get("form") != _HEAD["form"]:
        raise ValueError("expected a file of late work: give another path")
    if entry.get("version") != _HEAD["version"]:
        raise ValueError(f"version {quoted(entry.get('version'))} is not known: record it again")


def _checked(entry: Mapping[str, Any]) -> LateWork:
    from graphs.watch.repeats import check_call

    if entry.get("kind") not in get_args(Kind):
        kinds = ", ".join(get_args(Kind))
        raise ValueError(f"expected kind to be one of {kinds}, got {quoted(entry.get('kind'))}")
    for name in ("function", "file", "reason", "remedy", "name"):
        if not isinstance(entry.get(name, ""), str):
            raise ValueError(f"expected text as {name}, got {quoted(entry[name])}")
    line, need = entry.get("line", 0), entry.get("need", {})
    if type(line) is not int:
        raise ValueError(f"expected a number as line, got {quoted(line)}")
    if not isinstance(need, dict) or not all(type(n) is int and n >= 0 for n in need.values()):
        raise ValueError(f"expected sizes by axis as need, got {quoted(need)}")
    if unknown := entry.keys() - LateWork.__dataclass_fields__.keys():
        raise ValueError(f"unknown key {quoted(min(unknown))}")
    if not entry.get("function"):
        raise ValueError("expected the name of a function, got none")
    call = check_call(entry["call"]) if "call" in entry else None
    return LateWork(**{**cast("dict[str, Any]", entry), "call": call})


def _without_values(reason: str) -> str:
    """Leave out values that a guard compares with; sizes and types of tensors stay."""
    reason = _VALUE.sub(" changed", reason)
    is_of_values = re.search(r"['\"=<>]", reason) and not reason.startswith(("tensor '", "for "))
    return "" if is_of_values else reason
