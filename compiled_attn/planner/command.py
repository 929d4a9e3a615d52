"""The command `python -m compiled_attn.planner`: plans buckets for recorded needs of any module."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from compiled_attn.planner import plan as choose
from compiled_attn.planner import read_demand
from compiled_attn.planner.measured import read_limits
from graphs.buckets.file import to_file
from graphs.cli.errors import UserError, exit_code_of

__all__ = ["plan", "run_command"]


def plan(
    needs: Annotated[
        Path,
        typer.Argument(
            metavar="NEEDS", help='File of needs, a line such as {"rows": 3, "length": 17} each.'
        ),
    ],
    max_graphs: Annotated[int, typer.Option(min=1, metavar="K", help="Buckets at most.")] = 64,
    measured: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="What buckets cost: of `warmup --json FILE`, or a journal."
        ),
    ] = None,
    max_seconds: Annotated[
        float | None,
        typer.Option(metavar="S", help="Seconds of warmup at most, by --measured."),
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory of graphs at most, by --measured: 2GiB."),
    ] = None,
    rho: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="No need may pay more than X times its own cost; 0: no such guard."
        ),
    ] = 3.0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the bucket file here.")
    ] = None,
) -> int:
    """Choose the buckets that waste least on recorded needs, and write them as a bucket file.

    The cost of a bucket is the measured one, or else the product of its sizes. Exits with 2 on bad
    input.
    """
    if out is not None and out.is_dir():
        raise UserError(f"cannot write {out}: it is a directory, name a file")
    budget, costs = read_limits(max_graphs, max_seconds, max_bytes, measured)
    try:
        demand = read_demand(needs)
    except ValueError as error:  # names the file and the line
        raise UserError(str(error)) from error
    try:
        report = choose(demand, costs.run, budget, rho=rho or None, **costs.expenses)
    except ValueError as error:
        raise UserError(f"{needs}: {error}") from error
    for line in (*costs.notes, str(report)):
        typer.echo(line)
    if out is not None:
        try:
            to_file(report.space, out)
        except OSError as error:
            raise UserError(f"cannot write {out}: {error}") from error
        typer.echo(f"{len(report.space)} buckets in {out}")
    return 0


def run_command(argv: Sequence[str] | None = None) -> int:
    """Parse and run; returns the exit code."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(plan)
    arguments = None if argv is None else list(argv)
    return exit_code_of(
        lambda: app(
            args=arguments, prog_name="python -m compiled_attn.planner", standalone_mode=False
        ),
        (),
        "planner",
    )
