"""User errors: each becomes one line and an exit code; some are found before the work."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from graphs.errors import clipped

__all__ = [
    "BAD_INPUT",
    "FAILED",
    "INTERRUPTED",
    "UserError",
    "exit_code_of",
    "failed",
    "refuse_unwritable",
    "tell",
    "users_code",
]

_OURS = str(Path(__file__).parents[1])
_LONGEST = 2000  # characters of a line, part of which may come from a user's file

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130


class UserError(Exception):
    """Bad input, with one line that says what to do."""


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
    """Whatever the user's code raises in here, `SystemExit` too, is reported as its failure.

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


def exit_code_of(
    command: Callable[[], int | None], known: tuple[type[Exception], ...], program: str = "graphs"
) -> int:
    """Run a command; a known error is one line on stderr, and an unknown one is let through.

    Args:
        command: parses and runs; what it returns is the exit code, None is 0.
        known: errors that follow from the input.
        program: its name in that line.
    """
    import typer

    told: tuple[type[Exception], ...] = (UserError, *known)
    try:
        return command() or 0
    except (KeyboardInterrupt, typer.Abort):
        return tell("interrupted", INTERRUPTED, program)
    except told as error:
        return tell(error, BAD_INPUT, program)
    except Exception as error:
        # By its version, typer brings a click of its own or not: usage errors have this in common.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        return tell(message(), BAD_INPUT, program)


def tell(problem: object, code: int, program: str = "graphs") -> int:
    """Print a problem as one line on stderr, if there is anything to say; returns `code`."""
    kind = "" if code == INTERRUPTED else "error: "
    if line := " ".join(str(problem).split()):
        print(f"{program}: {kind}{clipped(line, _LONGEST)}", file=sys.stderr)
    return code


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
