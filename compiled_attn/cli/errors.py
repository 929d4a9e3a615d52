"""The one place that turns what a user can get wrong into a line and an exit code."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import typer

from compiled_attn.blocks import OutOfBlocks
from compiled_attn.engine import ConfigError
from graphs import BucketOverflow, CaptureError

__all__ = ["BAD_INPUT", "FAILED", "INTERRUPTED", "UserError", "bad_input", "exit_code_of", "tell"]

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130


class UserError(Exception):
    """Bad input, with the one line that tells the user what to do."""


@contextlib.contextmanager
def bad_input() -> Iterator[None]:
    """Everything in here comes from the user, so a ``ValueError`` or ``OSError`` is the user's."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error


def exit_code_of(command: Callable[[], int]) -> int:
    """Run a command; tell a known error in one line on stderr, and let an unknown one through."""
    try:
        return command()
    except (KeyboardInterrupt, typer.Abort):
        return tell("interrupted", INTERRUPTED)
    except (UserError, ConfigError, CaptureError, BucketOverflow, OutOfBlocks) as error:
        return tell(error, BAD_INPUT)
    except Exception as error:
        # By its version, typer brings a click of its own or not: usage errors have this in common.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        return tell(message(), BAD_INPUT)


def tell(problem: object, code: int) -> int:
    """Print a problem as one line on stderr; returns ``code``."""
    print(f"compiled-attn: error: {' '.join(str(problem).split())}", file=sys.stderr)
    return code
