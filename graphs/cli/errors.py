"""User errors: one line on stderr and an exit code."""

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
    "print_error",
    "refuse_unwritable",
    "user_error_from",
    "users_code",
]

_OURS = str(Path(__file__).parents[1])
_LONGEST = 2000  # characters of a line, part of which may come from a user's file

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130


class UserError(Exception):
    """Bad input; the message says what to do."""


def user_error_from(what: str, error: BaseException) -> UserError:
    """A UserError for an exception of the user's own code, with the line it came from."""
    from graphs.watch.causes import user_line_in

    frames = traceback.extract_tb(error.__traceback__)
    others = [frame for frame in frames if not frame.filename.startswith((_OURS, "<frozen "))]
    file, line = user_line_in(others or frames)
    location = f" ({file}:{line})" if file else ""
    return UserError(f"{what} failed: {type(error).__name__}: {error}{location}")


@contextlib.contextmanager
def users_code(what: str) -> Iterator[None]:
    """Context manager that turns what the user's code raises, even `SystemExit`, into a UserError.

    KeyboardInterrupt passes through.
    """
    try:
        yield
    except (KeyboardInterrupt, UserError):
        raise
    except BaseException as error:
        raise user_error_from(what, error) from error


def exit_code_of(
    command: Callable[[], int | None], known: tuple[type[Exception], ...], program: str = "graphs"
) -> int:
    """Run a command and return its exit code; print a known error as one line on stderr.

    Args:
        command: parses and runs; returns the exit code, or None for 0.
        known: errors caused by bad input. Others are raised.
        program: its name in that line.
    """
    import typer

    bad_input: tuple[type[Exception], ...] = (UserError, *known)
    try:
        return command() or 0
    except (KeyboardInterrupt, typer.Abort):
        return print_error("interrupted", INTERRUPTED, program)
    except bad_input as error:
        return print_error(error, BAD_INPUT, program)
    except Exception as error:
        # Usage errors; some versions of typer bundle click, so their class cannot be named.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        return print_error(message(), BAD_INPUT, program)


def print_error(problem: object, code: int, program: str = "graphs") -> int:
    """Print a problem, unless it is empty, as one line on stderr; returns `code`."""
    kind = "" if code == INTERRUPTED else "error: "
    if line := " ".join(str(problem).split()):
        print(f"{program}: {kind}{clipped(line, _LONGEST)}", file=sys.stderr)
    return code


def refuse_unwritable(files: Iterable[Path | None], folder: Path | None) -> None:
    """Check before the work that files and a report can be written; makes its folder.

    Raises:
        OSError: a file or the folder cannot be written to.
        UserError: a library of the report is not installed.
    """
    for path in files:
        if path is not None:
            existed = path.exists()
            path.open("a", encoding="utf-8").close()
            if not existed:
                path.unlink()
    if folder is not None:
        from graphs.report.page import check_libraries

        try:
            check_libraries()
        except ImportError as error:
            raise UserError(str(error)) from error
        folder.mkdir(parents=True, exist_ok=True)
