"""`plan`: from recorded needs to a bucket file with the least padding."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphs.buckets.file import to_file
from graphs.cli.errors import UserError
from graphs.cli.warmup_file import read_warmup

__all__ = ["plan"]


def plan(
    needs: Annotated[
        Path,
        typer.Argument(
            metavar="NEEDS", help='What was needed: a line such as {"rows": 3, "length": 17} each.'
        ),
    ],
    max_graphs: Annotated[int, typer.Option(min=1, metavar="K", help="Buckets at most.")] = 64,
    measured: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Cost of buckets: what `warmup --json FILE` measured."),
    ] = None,
    max_seconds: Annotated[
        float | None,
        typer.Option(metavar="S", help="Seconds of warmup at most, going by --measured."),
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

    The cost of a bucket is what was measured, or else the product of its sizes. Ends with 2 on bad
    input.
    """
    from graphs.planner import Budget, CostModel, read_demand
    from graphs.planner import plan as choose

    if out is not None and out.is_dir():
        raise UserError(f"cannot write {out}: it is a directory, name a file")
    if max_seconds is not None and measured is None:
        raise UserError("--max-seconds needs --measured: the seconds of some captures")
    rows = read_warmup(measured) if measured else []
    try:
        demand = read_demand(needs)
    except ValueError as error:  # names the file and the line
        raise UserError(str(error)) from error
    try:
        report = choose(
            demand,
            CostModel.fitted((r.bucket, r.run_seconds) for r in rows) if rows else None,
            Budget(graphs=max_graphs, seconds=max_seconds),
            seconds=CostModel.fitted((r.bucket, r.seconds) for r in rows) if rows else None,
            rho=rho or None,
        )
    except ValueError as error:
        raise UserError(f"{needs}: {error}") from error
    typer.echo(str(report))
    if out is not None:
        try:
            to_file(report.space, out)
        except OSError as error:
            raise UserError(f"cannot write {out}: {error}") from error
        typer.echo(f"{len(report.space)} buckets in {out}")
    return 0
