"""The command ``compiled-attn`` (extra ``cli``)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from graphs.installation import install_command

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command and ends the process with its exit code.

    Args:
        argv: arguments without the program's name; by default those of the process.

    Raises:
        SystemExit: always. 0: all is well; 1: a token differs, or something compiled after the
            warmup; 2: bad input; 130: interrupted.
    """
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        print(
            f"compiled-attn: error: the command needs {error.name}, which is not installed: "
            f"{install_command('cli', 'hf')}",
            file=sys.stderr,
        )
        sys.exit(2)
    from compiled_attn.cli.app import run_command

    sys.exit(run_command(argv))
