"""Reads what `warmup --json FILE` has measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from graphs.cli.errors import UserError

__all__ = ["Measured", "read_warmup"]


class Measured(NamedTuple):
    """A captured bucket: seconds of its capture, and of one run."""

    bucket: dict[str, int]
    seconds: float
    run_seconds: float


def read_warmup(path: Path) -> list[Measured]:
    """The captured buckets of a warmup whose runs were timed.

    Raises:
        UserError: the file cannot be read, is no such file, or has no timed bucket.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["buckets"]
        found = [
            Measured(dict(row["bucket"]), float(row["seconds"]), float(row["run_seconds"]))
            for row in rows
            if row["status"] == "captured" and row["run_seconds"] is not None
        ]
    except OSError as error:
        raise UserError(f"{path}: not readable as a warmup: {error}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: expected a file that `warmup --json` wrote") from error
    if not found:
        raise UserError(f"{path}: no captured bucket whose run was timed in it")
    return found
