"""Commands and options of ``compiled-attn``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from compiled_attn import __version__
from compiled_attn.cli.cache import DEFAULT_STORE, cache
from compiled_attn.cli.errors import exit_code_of
from compiled_attn.cli.explain import explain
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
from compiled_attn.cli.plan import plan

__all__ = ["app", "run_command"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Capture a model's step once, serve requests, never compile again.",
)


def run_command(argv: Sequence[str] | None = None) -> int:
    """Parse and run; returns the exit code."""
    arguments = None if argv is None else list(argv)
    return exit_code_of(
        lambda: app(args=arguments, prog_name="compiled-attn", standalone_mode=False) or 0
    )


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"compiled-attn {__version__}")
        raise typer.Exit


@app.callback()
def _compiled_attn(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


app.command()(explain)
app.command()(plan)
app.add_typer(cache, name="cache")

_DEMAND, _ENGINE, _RESULT = "What to serve", "How to serve it", "What to prove and write"


@app.command()
def run(
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            rich_help_panel=_DEMAND,
            help="Hugging Face causal LM; by default a small random Llama is built.",
        ),
    ] = None,
    trace: TraceOption = None,
    demand: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            rich_help_panel=_DEMAND,
            help="Demand to draw: chat (default), code or rag.",
        ),
    ] = None,
    requests: Annotated[
        int,
        typer.Option(
            min=1, max=10_000_000, rich_help_panel=_DEMAND, help="Requests to draw or read."
        ),
    ] = 40,
    scale: ScaleOption = None,
    seed: Annotated[
        int,
        typer.Option(
            min=0, max=2**63 - 1, rich_help_panel=_DEMAND, help="Seed of everything random."
        ),
    ] = 0,
    speed: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            rich_help_panel=_DEMAND,
            help="Open loop: keep the arrival times, X times as fast.",
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            rich_help_panel=_DEMAND,
            help="Closed loop: N requests in flight; by default all are offered at once.",
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(rich_help_panel=_DEMAND, help="0 is greedy decoding.")
    ] = 0.0,
    top_k: Annotated[
        int, typer.Option(rich_help_panel=_DEMAND, help="Sample from the k most likely; 0: all.")
    ] = 0,
    top_p: Annotated[
        float, typer.Option(rich_help_panel=_DEMAND, help="Sample from the most likely share p.")
    ] = 1.0,
    dtype: DtypeOption = "float32",
    backend: BackendOption = "inductor",
    kernel: KernelOption = Kernel.auto,
    store: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            rich_help_panel=_ENGINE,
            help=f"Folder of compiled graphs, for the next start; by default {DEFAULT_STORE}.",
        ),
    ] = None,
    no_store: Annotated[
        bool,
        typer.Option(
            "--no-store", rich_help_panel=_ENGINE, help="Compile all graphs, and keep none."
        ),
    ] = False,
    warmup_workers: Annotated[
        int,
        typer.Option(
            metavar="N", rich_help_panel=_ENGINE, help="Processes that compile, this one included."
        ),
    ] = 1,
    warmup_journal: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=_ENGINE,
            help="What each graph came to; a killed warmup goes on from it.",
        ),
    ] = None,
    max_tokens_per_step: MaxTokensOption = 256,
    max_seqs: MaxSeqsOption = 32,
    block_size: BlockSizeOption = 32,
    num_blocks: NumBlocksOption = None,
    defrag_waste: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            rich_help_panel=_ENGINE,
            help="Move blocks when this share of their range is unused; 1: never.",
        ),
    ] = 0.25,
    buckets: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=_ENGINE,
            help="Shapes to capture, one a line: tokens, shared, unique, logits (portable kernel) "
            "or tokens, requests (native).",
        ),
    ] = None,
    max_graphs: Annotated[
        int | None,
        typer.Option(metavar="N", rich_help_panel=_ENGINE, help="Graphs to capture at most."),
    ] = None,
    check: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            rich_help_panel=_RESULT,
            help="Generate N requests again with plain transformers and compare.",
        ),
    ] = 0,
    strict: Annotated[
        bool,
        typer.Option(
            rich_help_panel=_RESULT,
            help="A compile after warmup or a fallback is an error, or else a counted warning.",
        ),
    ] = True,
    report: Annotated[
        Path | None,
        typer.Option(metavar="DIR", rich_help_panel=_RESULT, help="Write an HTML report here."),
    ] = None,
    record_demand: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=_RESULT,
            help="Write what each step needed here, a JSON object a line, to plan buckets with.",
        ),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", rich_help_panel=_RESULT, help="Write the result here."),
    ] = None,
) -> int:
    """Warm up, serve a demand, and prove that nothing compiled meanwhile.

    Ends with 1 if a token differs from plain generate or something compiled after warmup, with 2 on
    bad input, with 130 when interrupted.
    """
    options = dict(locals())
    from compiled_attn.cli.job import Options, run_job

    return run_job(Options(**{**options, "kernel": kernel.value}))
