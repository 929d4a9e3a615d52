"""Reads what `warmup --json FILE` has measured."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from graphs.cli.errors import UserError
from graphs.errors import parse_json, quoted

__all__ = ["Measured", "read_warmup"]

_AGES = 1e9  # seconds


class Measured(NamedTuple):
    """A captured bucket: seconds of its capture, and of one run."""

    bucket: dict[str, int]
    seconds: float
    run_seconds: float

    @property
    def is_measured(self) -> bool:
        """Whether a clock can have told this of a bucket."""
        return all(type(size) is int and 0 <= size < 2**63 for size in self.bucket.values()) and (
            0 <= self.seconds < _AGES and 0 < self.run_seconds < _AGES
        )


def read_warmup(path: Path) -> list[Measured]:
    """The captured buckets of a warmup whose runs were timed.

    Raises:
        UserError: the file cannot be read, is no such file, or has no timed bucket.
    """
    try:
        rows = parse_json(path.read_bytes())["buckets"]
        found = [
            Measured(dict(row["bucket"]), float(row["seconds"]), float(row["run_seconds"]))
            for row in rows
            if row["status"] == "captured" and row["run_seconds"] is not None
        ]
    except OSError as error:
        raise UserError(f"{path}: not readable as a warmup: {error}") from error
    except (ValueError, TypeError, KeyError, ArithmeticError) as error:
        raise UserError(f"{path}: expected a file that `warmup --json` wrote") from error
    if strange := next((row for row in found if not row.is_measured), None):
        raise UserError(
            f"{path}: expected whole sizes and seconds of at least 0, got {quoted(strange)}"
        )
    if not found:
        raise UserError(f"{path}: no captured bucket whose run was timed in it")
    return found
