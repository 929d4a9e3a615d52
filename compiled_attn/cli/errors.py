"""The one place that turns what a user can get wrong into a line and an exit code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import graphs.cli.errors
from compiled_attn.errors import ConfigError, OutOfBlocks
from graphs.cli.errors import FAILED, INTERRUPTED, UserError
from graphs.errors import BucketOverflow, CaptureError

__all__ = ["FAILED", "INTERRUPTED", "UserError", "bad_input", "exit_code_of", "tell"]

_PROGRAM = "compiled-attn"
_KNOWN = ConfigError, OutOfBlocks, BucketOverflow, CaptureError


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


def exit_code_of(command: Callable[[], int | None]) -> int:
    """Run a command; tell a known error in one line on stderr, and let an unknown one through."""
    return graphs.cli.errors.exit_code_of(command, _KNOWN, _PROGRAM)


def tell(problem: object, code: int) -> int:
    """Print a problem as one line on stderr, if there is anything to say; returns ``code``."""
    return graphs.cli.errors.tell(problem, code, _PROGRAM)
