"""The command `python -m graphs` (extra `cli`: typer)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from graphs.cli.errors import BAD_INPUT, UserError, print_error
from graphs.installation import install_command

__all__ = ["UserError", "main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command and end the process with its exit code.

    Args:
        argv: arguments without the program's name; by default those of the process.

    Raises:
        SystemExit: always. 0: success; 1: there are graph breaks, or buckets that are not captured;
            2: bad input, explained in one line; 130: interrupted.
    """
    try:
        import typer  # noqa: F401
    except ImportError:
        sys.exit(print_error(f"the command needs typer: {install_command('cli')}", BAD_INPUT))
    from graphs.cli.app import run_command

    sys.exit(run_command(argv))
