"""Implements ``compiled-attn plan --format``: buckets for another engine, in its syntax."""

from __future__ import annotations

import math
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from compiled_attn.cli.errors import UserError, bad_input
from compiled_attn.cli.options import PlanOptions
from compiled_attn.contrib.versions import is_tested, listed
from compiled_attn.planner import Demand
from compiled_attn.planner.formats import FORMATS, EnginePart, Format, needs_of
from compiled_attn.planner.simulator import SimulatedEngine
from compiled_attn.planner.simulator.ladders import SplitPlan
from compiled_attn.workloads import read_trace
from compiled_attn.workloads.arrival import fit, scaled

__all__ = ["run_plan_for"]

_TOKENS = 8192


def run_plan_for(options: PlanOptions) -> int:
    """Compare a plan with the engine's own ladder, and write it as the engine reads it."""
    format = FORMATS.get(options.format or "")
    if format is None:
        names = ", ".join(FORMATS)
        raise UserError(f"expected --format of {names}, got {options.format!r}: choose one")
    if options.trace is None or options.demand is not None:
        raise UserError("expected --trace, and no --demand, with --format: give a trace")
    with bad_input():
        engine, context, needs = _needs(options, options.trace, format)
        plans = _plans(options, format.parts(engine, context), needs)
        reports = {name: each.whole() for name, each in plans.items()}
        text = format.write(reports, engine)
    _print(options, plans, format.beyond)
    print(_tested(format))
    if options.out is None:
        print(text)
        return 0
    with bad_input():
        options.out.write_text(text + "\n", encoding="utf-8")
    print(f"written: {format.use.format(file=options.out)}")
    return 0


def _needs(
    options: PlanOptions, trace: Path, format: Format
) -> tuple[SimulatedEngine, int, dict[str, Demand]]:
    """The engine's limits, its context, and the needs of its steps by part."""
    arrivals = read_trace(trace, options.requests)
    if options.scale is not None:
        arrivals = scaled(arrivals, options.scale)
    longest = max(each.prompt_tokens + each.output_tokens for each in arrivals)
    context, size, seqs = options.context or longest, options.block_size, options.max_seqs
    blocks = options.num_blocks or math.ceil(context / size) * seqs
    engine = SimulatedEngine(max(options.max_tokens_per_step or _TOKENS, seqs), seqs, size, blocks)
    if longest > context:
        arrivals = fit(arrivals, context)
    parts = format.parts(engine, context)
    concurrency, speed = options.concurrency, options.speed
    needs = needs_of(parts, arrivals, engine, speed=speed, concurrency=concurrency)
    return engine, context, needs


def _plans(
    options: PlanOptions, parts: list[EnginePart], needs: dict[str, Demand]
) -> dict[str, SplitPlan]:
    """A plan of each part; they share the graphs in proportion to the engine's own ladders."""
    whole = sum(len(part.default) for part in parts)
    if options.max_graphs < len(parts):
        raise UserError(
            f"expected --max-graphs of at least {len(parts)}: one for each kind of step"
        )
    plans, left = {}, options.max_graphs
    for number, part in enumerate(parts):
        share = max(1, round(options.max_graphs * len(part.default) / whole))
        count = left if number == len(parts) - 1 else min(share, left - (len(parts) - 1 - number))
        left -= count
        plans[part.name] = part.plan(needs[part.name], count, options.rho or None)
    return plans


def _print(options: PlanOptions, plans: dict[str, SplitPlan], beyond: str) -> None:
    console = Console()
    table = Table(title="Second half of the steps, planned on the first", title_justify="left")
    for name in ("steps", "strategy"):
        table.add_column(name, no_wrap=True)
    for name in ("graphs", "never used", "padding", "worst step"):
        table.add_column(name, justify="right")
    for name, each in plans.items():
        for strategy, judged in ((f"{options.format}'s default", each.theirs), ("plan", each.ours)):
            figures = f"{judged.waste:.1%}", f"{judged.worst:.1f}x"
            table.add_row(name, strategy, str(judged.graphs), str(judged.unused), *figures)
    console.print(table)
    for name, each in plans.items():
        if each.outside:
            line = f"{name}: {each.outside:.1%} of the steps are larger: each {beyond}"
            console.print(line, highlight=False, soft_wrap=True)


def _tested(format: Format) -> str:
    """One line: the versions that the syntax was tested with, and the installed one."""
    named = f"{format.package} {listed(format.tested)}"
    tried = named if format.tested else f"sources of {format.package}"
    try:
        found = version(format.package)
    except PackageNotFoundError:
        return f"syntax and picking rule: tested with {tried}"
    if format.tested and not is_tested(found, format.tested):
        return f"syntax and picking rule: expected {tried}, got {found}: check the result"
    return f"syntax and picking rule: tested with {tried}, {found} is installed"
