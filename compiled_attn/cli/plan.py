"""Implements ``compiled-attn plan``: compares bucket strategies and writes a bucket file."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from compiled_attn.cli.errors import UserError, bad_input
from compiled_attn.cli.inputs import fitted_arrivals, known_backend, model_of
from compiled_attn.cli.options import PlanOptions, settings_of
from compiled_attn.engine import EngineConfig
from compiled_attn.engine.kernel import chosen_kernel
from compiled_attn.engine.sizing import LAYOUTS, Sizing, StepSize, step_limits, work_of
from compiled_attn.planner import CostModel, Demand, PlanReport, read_demand
from compiled_attn.planner.measured import read_limits
from compiled_attn.planner.simulator import SimulatedEngine, simulate
from compiled_attn.planner.simulator.kinds import StepKind, step_kind
from compiled_attn.planner.simulator.ladders import SplitPlan
from compiled_attn.workloads import read_trace
from graphs import to_file

__all__ = ["run_plan"]

_ENOUGH_STEPS = 10_000
_LIMITS = {
    "tokens": "--max-tokens-per-step",
    "shared": "--num-blocks, --block-size, --context or MODEL",
    "unique": "--num-blocks, --max-seqs, --block-size, --context or MODEL",
    "logits": "--max-seqs",
    "requests": "--max-seqs",
}


def run_plan(options: PlanOptions) -> int:
    """Compare bucket strategies on a demand, and write the planned buckets; returns 0."""
    _refuse_contradictions(options)
    if options.format is not None:
        from compiled_attn.cli.plan_for import run_plan_for

        return run_plan_for(options)
    limits = options.max_graphs, options.max_seconds, options.max_bytes
    budget, costs = read_limits(*limits, options.measured)
    with bad_input():
        recorded = None if options.demand is None else _recorded(options.demand, options.kernel)
        sizing, engine, steps = _engine(options, recorded)
        if recorded is not None:
            _check_limits(options, recorded, steps)
            needs = recorded
        else:
            assert options.trace is not None
            needs = _simulated(options, options.trace, sizing, engine)[steps.name]
        found = SplitPlan(
            steps, needs, sizing.buckets, budget, options.rho or None, expenses=costs.expenses
        )
        _print(found, options.max_graphs)
        _write(options, found)
    return 0


def _refuse_contradictions(options: PlanOptions) -> None:
    if options.format is None and (options.trace is None) == (options.demand is None):
        got = "neither" if options.trace is None else "both"
        raise UserError(f"expected one of --trace and --demand, got {got}: choose what to plan for")
    if options.trace is None:
        for name in ("requests", "scale", "speed", "concurrency"):
            if getattr(options, name) is not None:
                raise UserError(f"expected --{name} with --trace only: give one, or leave it out")
    for name in ("measured", "max_seconds", "max_bytes") if options.format is not None else ():
        if getattr(options, name) is not None:
            flag = name.replace("_", "-")
            raise UserError(f"expected --{flag} without --format: captures are of this engine")
    known_backend(options)
    if options.rho != 0 and not options.rho > 1:
        raise UserError(f"expected --rho above 1, or 0 for no guard, got {options.rho:g}")
    if options.out is not None and not options.out.parent.is_dir():
        raise UserError(f"cannot write {options.out}: {options.out.parent} is not a directory")
    if options.out is not None and options.out.is_dir():
        raise UserError(f"cannot write {options.out}: it is a directory, name a file")


def _check_limits(options: PlanOptions, needs: Demand, steps: StepKind) -> None:
    for axis in steps.axes:
        if (largest := needs.largest[axis.name]) > axis.high:
            raise UserError(
                f"{options.demand}: expected needs with {axis.name} <= {axis.high}, got {largest}: "
                f"pass the limits that `run` had when it recorded them, {_LIMITS[axis.name]}"
            )


def _write(options: PlanOptions, found: SplitPlan) -> None:
    if options.out is None:
        return
    report = found.whole()
    print(f"{len(report.space)} buckets, planned on both halves: waste {report.waste:.1%}")
    to_file(report.space, options.out)
    print(f"written: compiled-attn run --buckets {options.out}")


def _engine(
    options: PlanOptions, recorded: Demand | None
) -> tuple[Sizing, SimulatedEngine, StepKind]:
    """The sizes that `run` would have, their simulation, and its steps with its cost."""
    config = EngineConfig(**settings_of(options), strict=False)
    model = model_of(options.model, options.dtype, device=options.device)
    if recorded is not None:
        kernel, note = _recorder(recorded) or "", ": the demand was recorded with it"
    else:
        chosen = chosen_kernel(model, config)
        kernel, note = chosen.name, chosen.notes["native"]
        note = f": {note}" if kernel == "native" else f"; native: {note}"
    print(f"for the {kernel} kernel{note}")
    sizing = Sizing.of(model, config, LAYOUTS[kernel])
    step = StepSize.of(config, sizing.layout.symbolic)
    limits = step_limits(config, step.tokens, sizing.context, sizing.num_blocks, sizing.window)
    pool = config.block_size, limits.pool_blocks
    engine = SimulatedEngine(limits.tokens, limits.seqs, *pool, window=sizing.window)
    cost = CostModel(sizing.layout.cost(work_of(model)))
    name = "table" if kernel == "native" else "engine"
    return sizing, engine, replace(step_kind(name, engine, sizing.context), cost=cost)


def _recorded(path: Path, kernel: str) -> Demand:
    needs = read_demand(path)
    recorder = _recorder(needs)
    if recorder is None:
        raise UserError(
            f"{path}: expected needs over {', '.join(LAYOUTS['portable'].axes)} (portable kernel) "
            f"or {', '.join(LAYOUTS['native'].axes)} (native), as `run --record-demand` "
            f"writes them, got {', '.join(needs.names)}: plan for other axes with "
            "`python -m compiled_attn.planner`"
        )
    if kernel not in ("auto", recorder):
        raise UserError(
            f"{path}: expected a demand of the {kernel} kernel, got one of the {recorder} kernel, "
            f"over {', '.join(needs.names)}: record one with it, or leave --kernel out"
        )
    return needs


def _recorder(needs: Demand) -> str | None:
    """The kernel whose steps have these axes."""
    return next(
        (name for name, layout in LAYOUTS.items() if {*layout.axes} == {*needs.names}), None
    )


def _simulated(
    options: PlanOptions, trace: Path, sizing: Sizing, engine: SimulatedEngine
) -> dict[str, Demand]:
    arrivals, message = fitted_arrivals(options, read_trace(trace, options.requests), sizing)
    print(message, file=sys.stderr)
    found = simulate(arrivals, engine, speed=options.speed, concurrency=options.concurrency)
    print(f"{len(found.needs['engine']):,} simulated steps", file=sys.stderr)
    return found.needs


def _print(found: SplitPlan, max_graphs: int) -> None:
    console = Console()
    table = Table(title="Second half of the steps, planned on the first", title_justify="left")
    table.add_column("strategy", no_wrap=True)
    for name in ("buckets", "never used", "waste", "worst need", "missed"):
        table.add_column(name, justify="right")
    for name, judged in found.judged(max_graphs).items():
        table.add_row(
            name,
            str(judged.graphs),
            str(judged.unused),
            f"{judged.waste:.1%}",
            f"{judged.worst:.1f}x",
            f"{judged.missed:.1%}",
        )
    console.print(table)
    for line in _remarks(found.early, found.fitting, found.outside):
        console.print(line, highlight=False, soft_wrap=True)


def _remarks(plan: PlanReport, needs: Demand, cut: float) -> list[str]:
    spent = [
        *([] if plan.seconds is None else [f"{plan.seconds:.3g} s of warmup"]),
        *([] if plan.bytes is None else [f"{plan.bytes / 2**20:.3g} MiB of graphs"]),
    ]
    remarks = [
        f"The plan wastes {plan.waste:.1%} on the first half. No legal need pays above "
        f"{plan.guard:.3g} times its cost."
    ]
    if spent:
        remarks.append(f"It takes {' and '.join(spent)}, by the measured captures.")
    if cut:
        remarks.append(f"{cut:.2%} of the steps are left out: the engine splits them.")
    if needs.total < _ENOUGH_STEPS:
        remarks.append(
            f"Only {needs.total:,.0f} steps: below {_ENOUGH_STEPS:,} a plan says little about "
            "tomorrow."
        )
    return remarks
