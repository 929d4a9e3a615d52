"""What buckets cost, read from the report or the journal of a warmup."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from compiled_attn.engine.config import byte_size
from compiled_attn.planner.cost import CostModel
from compiled_attn.planner.planning import Budget
from graphs.buckets.graph_memory import GraphMemory
from graphs.cli.errors import UserError
from graphs.errors import parse_json, quoted

__all__ = ["MeasuredCosts", "read_limits"]

_MAX_SECONDS = 1e9
_MAX_BYTES = 2**60


class MeasuredCosts(NamedTuple):
    """Models of a run's seconds, a capture's seconds, and the graphs' bytes; None: unknown.

    ``notes`` are lines for the user.
    """

    run: CostModel | None = None
    seconds: CostModel | None = None
    bytes: GraphMemory | None = None
    notes: tuple[str, ...] = ()

    @property
    def expenses(self) -> dict[str, Any]:
        """Arguments of `plan`."""
        return {"seconds": self.seconds, "bytes": self.bytes}


class _Row(NamedTuple):
    bucket: dict[str, int]
    seconds: float
    run_seconds: float | None
    bytes: int | None


def read_limits(
    max_graphs: int, max_seconds: float | None, max_bytes: str | None, measured: Path | None
) -> tuple[Budget, MeasuredCosts]:
    """Return the budget of a command's options, and what it takes of a warmup's measurements.

    Args:
        measured: what `warmup --json` wrote, or the journal of a warmup. Limits in seconds or bytes
            need it, with what they limit. Without such limits the seconds of a run are needed.

    Raises:
        UserError: a limit is bad or was not measured, or the file is something else.
    """
    for name, limit in (("--max-seconds", max_seconds), ("--max-bytes", max_bytes)):
        if limit is not None and measured is None:
            raise UserError(f"{name} needs --measured: what some captures took")
    try:
        size = None if max_bytes is None else byte_size("--max-bytes", max_bytes)
        budget = Budget(graphs=max_graphs, seconds=max_seconds, bytes=size)
    except ValueError as error:
        raise UserError(str(error)) from error
    return budget, _read_warmup(measured, budget) if measured else MeasuredCosts()


def _read_warmup(path: Path, budget: Budget) -> MeasuredCosts:
    rows = [row for each in _captured(path) if (row := _checked(path, each))]
    timed = [(row.bucket, row.run_seconds) for row in rows if row.run_seconds is not None]
    is_limited = budget.seconds is not None or budget.bytes is not None
    if not rows or not (timed or is_limited):
        raise UserError(f"{path}: no captured bucket whose run was timed in it")
    try:
        run = CostModel.fitted(timed) if timed else None
        seconds = CostModel.fitted((row.bucket, row.seconds) for row in rows)
        memory = None
        if budget.bytes is not None:
            grown = [(row.bucket, row.bytes) for row in rows if row.bytes is not None]
            memory = GraphMemory.fitted(grown)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    notes = [] if timed else ["no run was timed: a bucket costs the product of its sizes"]
    if memory is not None:
        notes.append(f"memory: {memory}")
    return MeasuredCosts(run, seconds, memory, tuple(notes))


def _captured(path: Path) -> list[dict[str, Any]]:
    """The captured buckets of a file; a journal has the last result of each bucket."""
    try:
        data = path.read_bytes()
        lines = data.splitlines()
        if lines and b"graphs warmup journal" in lines[0]:
            ended = lines if data.endswith(b"\n") else lines[:-1]  # a killed process was writing
            rows = {str(row["bucket"]): row for row in map(parse_json, ended[1:])}
            found = [*rows.values()]
        else:
            found = parse_json(data)["buckets"]
        return [row for row in found if row["status"] == "captured"]
    except OSError as error:
        raise UserError(f"{path}: not readable as a warmup: {error}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: expected a file that `warmup --json` wrote") from error


def _checked(path: Path, row: dict[str, Any]) -> _Row:
    try:
        run, grown = row.get("run_seconds"), row.get("bytes")
        found = _Row(
            dict(row["bucket"]),
            float(row["seconds"]),
            None if run is None else float(run),
            None if grown is None else int(grown),
        )
    except (ValueError, TypeError, KeyError, ArithmeticError) as error:
        raise UserError(f"{path}: expected a file that `warmup --json` wrote") from error
    are_sizes = all(type(size) is int and 0 <= size < 2**63 for size in found.bucket.values())
    times = (found.seconds, found.run_seconds or 0.0)
    are_times = all(0 <= time < _MAX_SECONDS for time in times)
    if not are_sizes or not are_times or not 0 <= (found.bytes or 0) < _MAX_BYTES:
        raise UserError(
            f"{path}: expected whole sizes, and seconds and bytes of at least 0, got "
            f"{quoted(tuple(found))}"
        )
    return found
