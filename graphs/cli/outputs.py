"""A check of where results go, before the work instead of after it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from graphs.cli.errors import UserError

__all__ = ["refuse_unwritable"]


def refuse_unwritable(files: Iterable[Path | None], folder: Path | None) -> None:
    """Open each file for writing, and make the report's folder; what is in them stays as it is.

    Raises:
        OSError: a result cannot be written there.
        UserError: a library that draws the report is not installed.
    """
    for path in files:
        if path is not None:
            existed = path.exists()
            path.open("a", encoding="utf-8").close()
            if not existed:  # nothing empty is left behind if the work fails
                path.unlink()
    if folder is not None:
        from graphs.report.page import check_libraries

        try:
            check_libraries()
        except ImportError as error:
            raise UserError(str(error)) from error
        folder.mkdir(parents=True, exist_ok=True)
