"""User errors: each becomes one line and an exit code."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from graphs.errors import clipped

__all__ = ["BAD_INPUT", "FAILED", "INTERRUPTED", "UserError", "failed", "tell", "users_code"]

_OURS = str(Path(__file__).parents[1])
_LONGEST = 2000  # characters of a line, which a file of the user's may have a part in

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130


class UserError(Exception):
    """Bad input, with the one line that tells the user what to do."""


def failed(what: str, error: BaseException) -> UserError:
    """The user's own code raised: what was being done, the error, and the line it came from."""
    from graphs.watch.causes import users_line

    frames = traceback.extract_tb(error.__traceback__)
    others = [frame for frame in frames if not frame.filename.startswith((_OURS, "<frozen "))]
    file, line = users_line(others or frames)
    place = f" ({file}:{line})" if file else ""
    return UserError(f"{what} failed: {type(error).__name__}: {error}{place}")


@contextlib.contextmanager
def users_code(what: str) -> Iterator[None]:
    """Whatever the user's code raises in here, `SystemExit` too, is told as its failure.

    Ctrl-C stays what it is.

    Raises:
        UserError: it raised something.
    """
    try:
        yield
    except (KeyboardInterrupt, UserError):
        raise
    except BaseException as error:
        raise failed(what, error) from error


def tell(problem: object, code: int) -> int:
    """Print a problem as one line on stderr, if there is anything to say; returns `code`."""
    kind = "" if code == INTERRUPTED else "error: "
    if line := " ".join(str(problem).split()):
        print(f"graphs: {kind}{clipped(line, _LONGEST)}", file=sys.stderr)
    return code
