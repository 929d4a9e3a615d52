"""Entry point of `python -m compiled_attn.testing` (extra `cli`)."""

from __future__ import annotations

import sys
from importlib import import_module

from graphs.cli.errors import BAD_INPUT, print_error
from graphs.installation import install_command

_SUBCOMMANDS = {"fuzz": "compiled_attn.testing.fuzz.command"}

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in _SUBCOMMANDS:
        sys.exit(import_module(_SUBCOMMANDS[sys.argv[1]]).run_command(sys.argv[2:]))
    try:
        import typer  # noqa: F401
    except ImportError:
        message = f"the command needs typer: {install_command('cli')}"
        sys.exit(print_error(message, BAD_INPUT, "compiled_attn.testing"))
    from compiled_attn.testing.kit.command import run_command

    sys.exit(run_command())
