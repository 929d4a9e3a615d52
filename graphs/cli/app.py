"""Commands of `python -m graphs`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from graphs.cli.cache import cache_app
from graphs.cli.errors import exit_code_of
from graphs.cli.explain import explain
from graphs.cli.warmup import warmup
from graphs.errors import BucketFileError, CaptureError, LateFileError

__all__ = ["run_command"]


def _default_store() -> Path:
    from graphs.store.cache_folder import cache_folder

    return cache_folder("graphs")


app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Capture a callable at a set of shapes, and check that nothing compiles any more.",
)
app.command()(explain)
app.command()(warmup)
app.add_typer(cache_app("~/.cache/graphs", find=_default_store), name="cache")


def run_command(argv: Sequence[str] | None = None) -> int:
    """Parse and run; returns the exit code."""
    arguments = None if argv is None else list(argv)
    return exit_code_of(
        lambda: app(args=arguments, prog_name="python -m graphs", standalone_mode=False),
        (BucketFileError, CaptureError, LateFileError),
    )
