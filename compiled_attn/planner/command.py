"""The command `python -m compiled_attn.planner`: plans buckets for recorded needs of any module."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from compiled_attn.planner import Budget, CostModel, read_demand
from compiled_attn.planner import plan as choose
from graphs.buckets.file import to_file
from graphs.cli.errors import UserError, exit_code_of
from graphs.errors import parse_json, quoted

__all__ = ["plan", "run_command"]

_MAX_SECONDS = 1e9


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
        typer.Option(metavar="FILE", help="Cost of buckets, as `warmup --json FILE` measured it."),
    ] = None,
    max_seconds: Annotated[
        float | None,
        typer.Option(metavar="S", help="Seconds of warmup at most, by --measured."),
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
    if max_seconds is not None and measured is None:
        raise UserError("--max-seconds needs --measured: the seconds of some captures")
    cost, seconds = _read_warmup(measured) if measured else (None, None)
    try:
        demand = read_demand(needs)
    except ValueError as error:  # names the file and the line
        raise UserError(str(error)) from error
    try:
        report = choose(
            demand,
            cost,
            Budget(graphs=max_graphs, seconds=max_seconds),
            seconds=seconds,
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


def _read_warmup(path: Path) -> tuple[CostModel, CostModel]:
    """Cost and warmup seconds of a bucket, from the captured buckets whose runs were timed."""
    try:
        rows = [
            (dict(row["bucket"]), float(row["run_seconds"]), float(row["seconds"]))
            for row in parse_json(path.read_bytes())["buckets"]
            if row["status"] == "captured" and row["run_seconds"] is not None
        ]
    except OSError as error:
        raise UserError(f"{path}: not readable as a warmup: {error}") from error
    except (ValueError, TypeError, KeyError, ArithmeticError) as error:
        raise UserError(f"{path}: expected a file that `warmup --json` wrote") from error
    if not rows:
        raise UserError(f"{path}: no captured bucket whose run was timed in it")
    for row in rows:
        bucket, *times = row
        are_sizes = all(type(size) is int and 0 <= size < 2**63 for size in bucket.values())
        if not are_sizes or not all(0 <= time < _MAX_SECONDS for time in times):
            raise UserError(
                f"{path}: expected whole sizes and seconds of at least 0, got {quoted(row)}"
            )
    try:
        cost = CostModel.fitted((bucket, run_seconds) for bucket, run_seconds, _ in rows)
        return cost, CostModel.fitted((bucket, seconds) for bucket, _, seconds in rows)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


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
