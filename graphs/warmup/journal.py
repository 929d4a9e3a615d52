"""The journal of a warmup: a file of results, for the next process to plan with."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from graphs.buckets.space import Bucket
from graphs.errors import JournalError, parse_json, quoted
from graphs.files import write_whole
from graphs.warmup.report import BucketResult

__all__ = ["Journal"]

_log = logging.getLogger(__name__)

_FORM = "graphs warmup journal"
_VERSION = 1
_NO_JOURNAL = "is not a warmup journal: give another path, or remove it"


class Journal:
    """Results of buckets, in a file that stays readable whenever the process is killed.

    One JSON object per line: the warmup, then a line when a capture starts and one when it is done.
    A truncated last line is ignored. It has measurements only, no compiled code.

    Args:
        path: the file, which is created, or continued if it is of the same warmup.
        name: of the callable.
        backend: name of the backend.
        axes: names of the axes.

    Raises:
        JournalError: the file is something else; it is not changed.
        OSError: it cannot be read or written.
    """

    def __init__(self, path: str | Path, name: str, backend: str, axes: Iterable[str]) -> None:
        self.path = Path(path)
        self._head: dict[str, Any] = {"form": _FORM, "version": _VERSION}
        self._head |= {"name": name, "backend": backend, "axes": [*axes]}
        self._entries: dict[Bucket, dict[str, Any]] = {}
        self._is_broken = False
        if lines := self._lines():
            self._read(lines)
        self._rewrite()

    @property
    def previously_failed(self) -> list[Bucket]:
        """Buckets that failed, or during whose capture the process died."""
        return [b for b, entry in self._entries.items() if entry["status"] in ("failed", "started")]

    @property
    def seconds(self) -> Mapping[Bucket, float]:
        """Seconds of each captured bucket."""
        return {
            bucket: entry["seconds"]
            for bucket, entry in self._entries.items()
            if entry["status"] == "captured"
        }

    def start(self, bucket: Bucket) -> None:
        """Record the start of a capture."""
        self._append({"bucket": dict(bucket), "status": "started"})

    def done(self, result: BucketResult) -> None:
        """Record a result; a skipped bucket does not replace its earlier one."""
        if result.status != "skipped":
            self._append({**asdict(result), "bucket": dict(result.bucket)})

    def _append(self, line: dict[str, Any]) -> None:
        self._learn(line)
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:  # a full disk must not stop this warmup
            if not self._is_broken:
                _log.warning("%s is not continued: %s", self.path, error)
            self._is_broken = True

    def _learn(self, line: dict[str, Any]) -> None:
        status, seconds = str(line["status"]), float(line.get("seconds", 0.0))
        self._entries[Bucket(**line["bucket"])] = {**line, "status": status, "seconds": seconds}

    def _lines(self) -> list[str]:
        try:
            return self.path.read_text("utf-8").splitlines() if self.path.exists() else []
        except UnicodeDecodeError as error:
            raise JournalError(f"{self.path} {_NO_JOURNAL}") from error

    def _read(self, lines: list[str]) -> None:
        head = None
        with suppress(ValueError):
            head = parse_json(lines[0])
        if not isinstance(head, dict) or head.get("form") != _FORM:
            raise JournalError(f"{self.path} {_NO_JOURNAL}")
        for key, expected in self._head.items():
            if head.get(key) != expected:
                raise JournalError(
                    f"{self.path} has {key} {quoted(head.get(key))}, expected {quoted(expected)}: "
                    "give another path, or remove it"
                )
        for line, text in enumerate(lines[1:], start=2):
            try:
                self._learn(parse_json(text))
            except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
                if line < len(lines):
                    raise JournalError(f"{self.path}:{line} is not readable: remove it") from error

    def _rewrite(self) -> None:
        # Drops a truncated line, to which nothing may be appended; atomic.
        lines = [self._head, *self._entries.values()]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, text.encode())
