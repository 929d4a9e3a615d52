"""Turns errors of the user into one line and an exit code."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import graphs.cli.errors
from compiled_attn.errors import ConfigError, OutOfBlocks
from graphs.cli.errors import FAILED, INTERRUPTED, UserError
from graphs.errors import BucketOverflow, CaptureError

__all__ = ["FAILED", "INTERRUPTED", "UserError", "bad_input", "exit_code_of", "report_error"]

_PROGRAM = "compiled-attn"
_KNOWN = ConfigError, OutOfBlocks, BucketOverflow, CaptureError


@contextlib.contextmanager
def bad_input() -> Iterator[None]:
    """Turns exceptions that follow from the input alone into UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(_describe(error)) from error
    except (ValueError, ArithmeticError) as error:
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


def _describe(error: OSError) -> str:
    if not error.filename or not error.strerror:
        return str(error)
    return f"{error.filename}: {error.strerror}: choose a path that can be read or written"


exit_code_of = functools.partial(graphs.cli.errors.exit_code_of, known=_KNOWN, program=_PROGRAM)
report_error = functools.partial(graphs.cli.errors.print_error, program=_PROGRAM)
