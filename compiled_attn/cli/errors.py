"""The one place that turns what a user can get wrong into a line and an exit code."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import typer

__all__ = ["BAD_INPUT", "FAILED", "INTERRUPTED", "UserError", "bad_input", "exit_code_of", "tell"]

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130
_LONGEST = 2000  # characters of a line, which a file of the user's may have a part in


class UserError(Exception):
    """Bad input, with the one line that tells the user what to do."""


@contextlib.contextmanager
def bad_input() -> Iterator[None]:
    """What is done in here follows from the input alone, so its errors are told to the user."""
    try:
        yield
    except (ValueError, OSError, ArithmeticError) as error:
        raise UserError(str(error)) from error
    except (RuntimeError, MemoryError) as error:
        # torch has no class of its own for a CPU allocation that fails.
        words = ("allocate", "overflow", "out of memory")
        if isinstance(error, RuntimeError) and not any(w in str(error).lower() for w in words):
            raise
        raise UserError(
            "not enough memory: choose a smaller model, or smaller --num-blocks and "
            "--max-tokens-per-step"
        ) from error


def exit_code_of(command: Callable[[], int]) -> int:
    """Run a command; tell a known error in one line on stderr, and let an unknown one through."""
    try:
        return command()
    except (KeyboardInterrupt, typer.Abort):
        return tell("interrupted", INTERRUPTED)
    except UserError as error:
        return tell(error, BAD_INPUT)
    except Exception as error:
        # By its version, typer brings a click of its own or not: usage errors have this in common.
        if (message := getattr(error, "format_message", None)) is not None:
            return tell(message(), BAD_INPUT)
        if isinstance(error, _known_errors()):
            return tell(error, BAD_INPUT)
        raise


def tell(problem: object, code: int) -> int:
    """Print a problem as one line on stderr, if there is anything to say; returns ``code``."""
    from graphs.errors import clipped

    kind = "" if code == INTERRUPTED else "error: "
    if line := " ".join(str(problem).split()):
        print(f"compiled-attn: {kind}{clipped(line, _LONGEST)}", file=sys.stderr)
    return code


def _known_errors() -> tuple[type[Exception], ...]:
    import graphs.cli.errors
    from compiled_attn.errors import ConfigError, OutOfBlocks
    from graphs import BucketOverflow, CaptureError

    return ConfigError, OutOfBlocks, BucketOverflow, CaptureError, graphs.cli.errors.UserError
