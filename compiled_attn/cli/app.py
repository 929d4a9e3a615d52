"""Commands of ``compiled-attn``; each imports its code when it runs, so that help is quick."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from compiled_attn import __version__
from compiled_attn.cli.errors import UserError, bad_input, exit_code_of
from compiled_attn.cli.options import (
    DEFAULT_STORE,
    BundleOptions,
    ChatOptions,
    PlanOptions,
    RunOptions,
    ServeOptions,
    given_settings,
    taking,
)
from compiled_attn.garbage import rare_collections

__all__ = ["app", "run_command"]

_NAME = "compiled-attn"
# Commands of `graphs` parse their own arguments, --help too.
_GRAPHS_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Capture a model's step once, serve requests, never compile again.",
)


def run_command(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    arguments = None if argv is None else list(argv)
    with rare_collections:
        return exit_code_of(lambda: app(args=arguments, prog_name=_NAME, standalone_mode=False))


def _examples(*commands: str) -> str:
    return "\n\n".join(["Examples:", *commands])


def _version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"{_NAME} {__version__}")
        import torch  # takes seconds

        from graphs.torch_internals.catalog import features_line

        typer.echo(f"torch {torch.__version__}, features: {features_line()}")
        raise typer.Exit


@app.callback()
def _compiled_attn(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command(
    epilog=_examples(
        "compiled-attn run --requests 10 --check 2",
        'compiled-attn run smollm2 --prompt "The capital of France is" --max-new-tokens 32',
    )
)
@taking(RunOptions)
def run(options: RunOptions) -> int:
    """Warm up, serve requests, and prove that nothing compiled meanwhile.

    Ends with 1 if a token differs from plain generate or something compiled after warmup, with 2 on
    bad input, with 130 when interrupted.
    """
    from compiled_attn.waiting import choose_waiting

    waiting = choose_waiting(options.threads)
    from compiled_attn.cli.run import run_job  # loads torch, which reads how threads should wait

    return run_job(options, waiting)


@app.command(
    epilog=_examples(
        "compiled-attn chat",
        'compiled-attn chat path/to/model --dtype bfloat16 --system "Answer in one sentence."',
    )
)
@taking(ChatOptions)
def chat(options: ChatOptions) -> int:
    """Talk with a model: answers come as they are generated.

    A line is a turn, on a terminal or from a pipe; with --prompt one answer is given. /reset
    forgets the conversation, /exit or Ctrl-D ends it, /help lists these commands. Ends with 2 on
    bad input, with 130 when interrupted.
    """
    if sys.stderr.isatty():  # torch alone takes seconds to load
        print(f"{_NAME}: loading {options.model}", file=sys.stderr, flush=True)
    from compiled_attn.waiting import choose_waiting

    choose_waiting(options.threads)
    from compiled_attn.cli.chat import run_chat  # loads torch, which reads how threads should wait

    return run_chat(options)


@app.command(
    epilog=_examples(
        "compiled-attn serve",
        "compiled-attn serve path/to/model --dtype bfloat16 --port 8080",
    )
)
@taking(ServeOptions)
def serve(options: ServeOptions) -> int:
    """Serve a model over HTTP with OpenAI's interface, to many clients at once.

    It listens at once; GET /health reports when the model is warm. The first Ctrl-C or SIGTERM
    answers open requests before it ends. Ends with 2 on bad input.
    """
    from compiled_attn.waiting import choose_waiting

    if options.bundle is None or options.replicas is not None or options.or_compile:
        choose_waiting(options.threads)
        bundle = None
    else:
        if given := given_settings(options):
            raise UserError(
                f"expected no {', '.join(given)} with --bundle, which has model and engine: leave "
                "them out, or add --or-compile"
            )
        from compiled_attn.bundle import Bundle
        from compiled_attn.cli.preload import import_server, preload_torch

        with bad_input():
            bundle = Bundle(options.bundle)  # reads its files meanwhile
        choose_waiting(options.threads, import_server)
        preload_torch()
    from compiled_attn.cli.serve import run_serve  # loads torch, see above

    return run_serve(options, bundle)


@app.command(
    epilog=_examples(
        "compiled-attn bundle smollm2 --out smollm2.bundle",
    )
)
@taking(BundleOptions)
def bundle(options: BundleOptions) -> int:
    """Write a model with its compiled graphs to a folder that `serve` starts from in seconds.

    The folder is for this kind of processor and this torch, and needs no compiler there. Ends with
    2 on bad input.
    """
    from compiled_attn.waiting import choose_waiting

    choose_waiting(options.threads)
    from compiled_attn.cli.bundle import run_bundle  # loads torch, see above

    return run_bundle(options)


@app.command(
    epilog=_examples(
        "compiled-attn plan --trace trace.csv --out buckets.txt",
        "compiled-attn plan path/to/model --demand demand.jsonl --max-graphs 12",
    )
)
@taking(PlanOptions)
def plan(options: PlanOptions) -> int:
    """Show what bucket strategies waste on a trace, and write a planned bucket file.

    The plan is fitted on the first half of the steps and judged, like the others, on the second.
    The written file is planned on both halves. Pass the limits that `run` will have. Exits with 2
    on bad input.
    """
    from compiled_attn.cli.plan import run_plan

    return run_plan(options)


@app.command(add_help_option=False, context_settings=_GRAPHS_SETTINGS)
def explain(context: typer.Context) -> int:
    """Print graphs, graph breaks (with the reason and your line) and guards of a callable."""
    from graphs.cli.app import app as graphs_app

    return graphs_app(["explain", *context.args], prog_name=_NAME, standalone_mode=False) or 0


@app.command(add_help_option=False, context_settings=_GRAPHS_SETTINGS)
def cache(context: typer.Context) -> int:
    """List, check or prune the graphs that `run` has stored."""
    from compiled_attn.cli.store import default_store
    from graphs.cli.cache import cache_app

    stored = cache_app(DEFAULT_STORE, find=default_store)
    return stored(context.args, prog_name=f"{_NAME} cache", standalone_mode=False) or 0
