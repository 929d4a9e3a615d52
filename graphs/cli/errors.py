"""The one place that turns what a user can get wrong into a line and an exit code."""

from __future__ import annotations

import sys
import traceback

__all__ = ["BAD_INPUT", "FAILED", "INTERRUPTED", "UserError", "failed", "tell"]

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130


class UserError(Exception):
    """Bad input, with the one line that tells the user what to do."""


def failed(what: str, error: BaseException) -> UserError:
    """The user's own code raised: what was being done, the error, and the line it came from."""
    frame = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" ({frame[0].filename}:{frame[0].lineno})" if frame else ""
    return UserError(f"{what} failed: {type(error).__name__}: {error}{place}")


def tell(problem: object, code: int) -> int:
    """Print a problem as one line on stderr, if there is anything to say; returns `code`."""
    kind = "" if code == INTERRUPTED else "error: "
    if line := " ".join(str(problem).split()):
        print(f"graphs: {kind}{line}", file=sys.stderr)
    return code
