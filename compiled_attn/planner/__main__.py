"""Entry point of `python -m compiled_attn.planner` (extra `planner`)."""

from __future__ import annotations

import sys

from graphs.cli.errors import BAD_INPUT, print_error
from graphs.installation import install_command

if __name__ == "__main__":
    try:
        import typer  # noqa: F401
    except ImportError:
        message = f"the command needs typer: {install_command('planner')}"
        sys.exit(print_error(message, BAD_INPUT, "planner"))
    from compiled_attn.planner.command import run_command

    sys.exit(run_command())
