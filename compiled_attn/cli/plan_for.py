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
from compiled_attn.planner.formats import FORMATS, EnginePart, Format, needs_of, thinned
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
        parts, most = _within_captures(options, format, format.parts(engine, context))
        plans = format.plans(parts, needs, most, options.rho or None)
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


def _within_captures(
    options: PlanOptions, format: Format, parts: list[EnginePart]
) -> tuple[list[EnginePart], int]:
    """The parts, with ladders that the device can capture, and how many graphs it can."""
    if format.captures is None:
        if options.layers is not None:
            raise UserError(f"expected no --layers with --format {options.format}: leave it out")
        return parts, options.max_graphs
    if options.layers is None:
        raise UserError(
            f"expected --layers with --format {options.format}: how many buckets its device can "
            "capture depends on the model's hidden layers"
        )
    most = format.captures(options.layers, options.comm_groups, options.streams)
    print(f"streams for {most} sizes: {options.layers} layers, {options.comm_groups} groups")
    return [thinned(part, most) for part in parts], min(most, options.max_graphs)


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
