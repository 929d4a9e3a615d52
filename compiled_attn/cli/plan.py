"""``compiled-attn plan``: from a trace or a recorded demand to the buckets that waste least."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from compiled_attn.cli.options import (
    BackendOption,
    BlockSizeOption,
    DtypeOption,
    Kernel,
    KernelOption,
    MaxSeqsOption,
    MaxTokensOption,
    NumBlocksOption,
    ScaleOption,
    TraceOption,
)

__all__ = ["plan"]

_DEMAND, _ENGINE = "What to serve", "How to serve it"
_RESULT = "What to choose and write"


def plan(
    trace: TraceOption = None,
    demand: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=_DEMAND,
            help="What `run --record-demand FILE` has recorded.",
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", rich_help_panel=_DEMAND, help="Requests to read; by default all."
        ),
    ] = None,
    scale: ScaleOption = None,
    speed: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            rich_help_panel=_DEMAND,
            help="Keep the arrival times, X times as fast; by default all come at once.",
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", rich_help_panel=_DEMAND, help="N requests in flight."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            rich_help_panel=_ENGINE,
            help="Hugging Face causal LM; by default the one that `run` builds.",
        ),
    ] = None,
    dtype: DtypeOption = "float32",
    backend: BackendOption = "inductor",
    kernel: KernelOption = Kernel.auto,
    max_tokens_per_step: MaxTokensOption = 256,
    max_seqs: MaxSeqsOption = 32,
    block_size: BlockSizeOption = 32,
    num_blocks: NumBlocksOption = None,
    max_graphs: Annotated[
        int,
        typer.Option(
            min=1, max=1000, metavar="K", rich_help_panel=_RESULT, help="Buckets at most."
        ),
    ] = 24,
    rho: Annotated[
        float,
        typer.Option(
            metavar="X",
            rich_help_panel=_RESULT,
            help="No need may pay more than X times its own cost; 0: no such guard.",
        ),
    ] = 3.0,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=_RESULT,
            help="Write the buckets here, for `run --buckets FILE`.",
        ),
    ] = None,
) -> int:
    """Show what bucket strategies waste on a trace, and write a planned bucket file.

    The plan is fitted on the first half of the steps and judged, like the others, on the second.
    What is written is planned on both halves; without trace and demand, on a mixture of drawn
    workloads. Give the limits that `run` will have. Ends with 2 on bad input.
    """
    options = dict(locals())
    from compiled_attn.cli.plan_job import PlanOptions, run_plan

    return run_plan(PlanOptions(**{**options, "kernel": kernel.value}))
