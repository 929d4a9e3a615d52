"""`explain`: print graphs, graph breaks and guards of a user's callable."""

from __future__ import annotations

from typing import Annotated

import typer

from graphs.cli.errors import FAILED, UserError, users_code
from graphs.cli.target import Named, load_target

__all__ = ["explain"]


def explain(
    target: Named,
    input: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SHAPE:DTYPE",
            help="An input such as 2x8:int64 or =3; repeat for each, in order.",
        ),
    ] = None,
    inputs: Annotated[
        str,
        typer.Option(metavar="NAME", help="Without --input: the function that makes the inputs."),
    ] = "example_inputs",
    bucket: Annotated[
        str | None,
        typer.Option(metavar="SIZES", help="Bucket for that function, such as rows=4,length=16."),
    ] = None,
    grad: Annotated[bool, typer.Option(help="Trace with grad mode on.")] = False,
    graphs: Annotated[bool, typer.Option(help="Print the graphs.")] = True,
    guards: Annotated[bool, typer.Option(help="Print the guards.")] = True,
) -> int:
    """Print graphs, graph breaks (with the reason and your line) and guards of a callable.

    Runs the callable on the inputs. The exit code is 1 if there is a break, 2 on bad input.
    """
    import torch

    from graphs.cli.inputs import inputs_of, parse_bucket, parse_input
    from graphs.torch_internals.catalog import features_line
    from graphs.torch_internals.tracing import quiet_logs
    from graphs.watch.explain import explain as explain_callable

    if input and bucket:
        raise UserError("--input and --bucket were both given: choose one source of the inputs")
    size = parse_bucket(bucket) if bucket else None
    given = [parse_input(text) for text in input or ()]
    found = load_target(target)
    with torch.set_grad_enabled(grad), quiet_logs():
        examples = given or inputs_of(found, inputs, size)
        with users_code(f"running {target}"):
            report = explain_callable(found.callable, *examples)
    typer.echo(report.text(graphs=graphs, guards=guards))
    typer.echo(f"torch {torch.__version__}, features: {features_line()}")
    return FAILED if report.breaks else 0
