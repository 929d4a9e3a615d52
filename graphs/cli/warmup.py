"""`warmup`: capture a user's callable at every bucket of a file, and report each result."""

from __future__ import annotations

import json as json_text
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from graphs.cli.errors import (
    BAD_INPUT,
    FAILED,
    INTERRUPTED,
    UserError,
    print_error,
    refuse_unwritable,
    user_error_from,
)
from graphs.cli.target import Named, Target, load_target
from graphs.errors import CaptureError, StoreError

if TYPE_CHECKING:
    from graphs.warmup.manager import WarmupManager
    from graphs.warmup.schedule import Order

__all__ = ["warmup"]


def warmup(
    target: Named,
    buckets: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Bucket file: the shapes to capture.")
    ] = None,
    late: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also warm up what compiled late in an earlier run: from no_compile(record=FILE).",
        ),
    ] = None,
    inputs: Annotated[
        str, typer.Option(metavar="NAME", help="The function that makes the inputs of a bucket.")
    ] = "example_inputs",
    backend: Annotated[str, typer.Option(help="How to capture.")] = "inductor",
    order: Annotated[
        str, typer.Option(help="largest_first, smallest_first or given.")
    ] = "largest_first",
    symbolic: Annotated[
        bool, typer.Option("--symbolic", help="Compile once for all sizes of the axes.")
    ] = False,
    store: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Store compiled graphs here for later processes."),
    ] = None,
    budget_seconds: Annotated[
        float | None, typer.Option(metavar="S", help="Start no capture after S seconds.")
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Saves the result of each bucket, to resume after a kill."
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write an HTML page and JSON here.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the result of each bucket here.")
    ] = None,
) -> int:
    """Capture a callable at every bucket, which fills the compile caches and tests it.

    The exit code is 1 if a bucket is not captured or late work is left, 2 on bad input, 130 when
    interrupted.
    """
    options = {name: os.fspath(v) if isinstance(v, Path) else v for name, v in locals().items()}
    from graphs.buckets.file import from_file
    from graphs.capture.capture import available_backends
    from graphs.capture.inputs import name_of
    from graphs.cli.inputs import make_inputs_of
    from graphs.store.graph_store import STORED, GraphStore, open_store
    from graphs.warmup.manager import WarmupManager
    from graphs.watch.late import late_buckets

    if buckets is None:
        if late is None:
            raise UserError("expected --buckets FILE, --late FILE or both: the shapes to capture")
        return _warm_up_late(late, load_target(target), "")
    if reason := available_backends().get(backend, "there is none of that name"):
        raise UserError(f"--backend {backend} cannot work here: {reason}")
    if store is not None and backend not in STORED:
        raise UserError(f"--store works with --backend {', '.join(STORED)}; got {backend}")
    space = from_file(buckets)
    found = load_target(target)
    make_inputs = make_inputs_of(found, inputs)
    with ExitStack() as stack:
        try:
            if late is not None:
                space = late_buckets(late, space, name_of(found.callable))
            opened = GraphStore(backend) if store is None else open_store(backend, store)
            stack.callback(opened.close)
            stack.enter_context(opened.capturing())
            manager = WarmupManager(
                found.callable,
                space,
                make_inputs,
                backend=opened.backend,
                symbolic=space.names if symbolic else (),
                order=cast("Order", order),
                budget_seconds=budget_seconds,
                journal=journal,
            )
            refuse_unwritable([json], report)
        except (ValueError, OSError, CaptureError, StoreError) as error:
            raise UserError(str(error)) from error
        code = _warm_up(manager, target)
    result = manager.report
    if result is None:
        return code
    typer.echo(str(result))
    try:
        if json is not None:
            json.write_text(json_text.dumps(result.to_json(), indent=2) + "\n", encoding="utf-8")
        if report is not None:
            typer.echo(_write_page(report, manager, options))
    except OSError as error:
        raise UserError(f"cannot write the result: {error}") from error
    if late is not None and code in (0, FAILED):
        code = _warm_up_late(late, found, name_of(found.callable)) or code
    return code or (0 if len(result.captured) == len(space) else FAILED)


def _warm_up_late(path: Path, target: Target, captured: str) -> int:
    """Repeat late calls of the target and of what is compiled in its module; print what is left."""
    from graphs.torch_internals.compiled_callables import code_of_compiled
    from graphs.watch.late import repeat
    from graphs.watch.late_file import read_late

    try:
        late = [work for work in read_late(path) if not (work.need and work.name == captured)]
    except OSError as error:
        raise UserError(f"--late: {error}") from error
    values = {id(value): value for value in (target.callable, *vars(target.module).values())}
    compiled = [value for value in values.values() if code_of_compiled(value) is not None]
    report = repeat(late, compiled)
    typer.echo(str(report))
    return FAILED if report.left else 0


def _warm_up(manager: WarmupManager, target: str) -> int:
    """Warm up; returns an exit code, also after Ctrl-C or an exit in the user's code."""
    from graphs.warmup.progress import progress_for

    try:
        with progress_for(sys.stderr) as progress:
            manager.warmup(progress)
    except CaptureError as error:  # no bucket is captured; the report has the causes
        return print_error(error, FAILED)
    except KeyboardInterrupt:
        return print_error("interrupted; the results so far:", INTERRUPTED)
    except BaseException as error:
        if isinstance(error, Exception):
            raise
        problem = user_error_from(f"capturing {target}", error)  # such as SystemExit
        return print_error(f"{problem}; the results so far:", BAD_INPUT)
    return 0


def _write_page(folder: Path, manager: WarmupManager, options: Mapping[str, Any]) -> Path:
    from graphs.report import describe, write_report
    from graphs.report.surroundings import surroundings

    facts = surroundings(["compiled-attn"]) | {"options": options} | describe(manager)
    return write_report(folder, facts, title=f"Warmup of {options['target']}")
