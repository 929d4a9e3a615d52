"""The command `python -m compiled_attn.testing`: a report on one paged attention op."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from compiled_attn.testing.kit.load import find
from graphs.cli.errors import FAILED, UserError, exit_code_of, refuse_unwritable

__all__ = ["run_command", "test"]

_PROGRAM = "python -m compiled_attn.testing"


def test(
    op: Annotated[
        str | None,
        typer.Argument(metavar="MODULE:OP", help="Module or .py file, and the op in it."),
    ] = None,
    interface: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Signature, or MODULE:CLASS of your own; default: by parameters."
        ),
    ] = None,
    claims: Annotated[
        str | None, typer.Option(metavar="A,B", help="Features to test instead of the declared.")
    ] = None,
    dtypes: Annotated[
        str | None, typer.Option(metavar="A,B", help="Dtypes: float32,bfloat16,..")
    ] = None,
    head_dims: Annotated[
        str | None, typer.Option(metavar="N,M", help="Head sizes to test.")
    ] = None,
    block_sizes: Annotated[
        str | None, typer.Option(metavar="N,M", help="Block sizes to test, in tokens.")
    ] = None,
    groups: Annotated[
        str | None, typer.Option(metavar="N,M", help="Query heads per KV head to test.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device, such as cuda.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all inputs.")] = 0,
    part: Annotated[
        list[str] | None,
        typer.Option("-k", metavar="PART", help="Run cases with this in their name."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON.")
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the report as HTML.")
    ] = None,
    script_file: Annotated[
        Path | None,
        typer.Option("--script", metavar="FILE", help="Write the smallest failing case here."),
    ] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="List the cases and exit.")] = False,
) -> int:
    """Test every feature that a paged attention op claims, and print a table of results.

    Exits with 1 if a case fails, with 2 on bad input. To fuzz a whole engine instead:
    python -m compiled_attn.testing fuzz --help
    """
    from compiled_attn.testing.kit.run import run_cases, select

    cases = select(part)
    if list_cases:
        for case in cases:
            needs = f" (needs {', '.join(sorted(case.needs))})" if case.needs else ""
            typer.echo(f"{case.name}: {case.guarantee}{needs}")
        return 0
    if op is None:
        raise UserError("expected MODULE:OP, got none: name one, such as mykernel.py:my_op")
    try:
        refuse_unwritable((json_file, html_file, script_file), None)
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}") from error
    changes: dict[str, Any] = {
        "features": _items(claims), "dtypes": _items(dtypes),
        "head_dims": _sizes("--head-dims", head_dims),
        "block_sizes": _sizes("--block-sizes", block_sizes),
        "groups": _sizes("--groups", groups), "device": device,
    }  # fmt: skip
    given = {name: value for name, value in changes.items() if value is not None}
    report = run_cases(find(op, interface, given), seed, cases)
    typer.echo(str(report))
    if not any(each.steps for each in report.results):
        raise UserError("no case ran, since none is claimed: see --claims and -k")
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_dict(), indent=1) + "\n")
    if html_file is not None:
        html_file.write_text(report.to_html())
    if script_file is not None and not report.ok:
        script_file.write_text(report.script_in(script_file.parent))
        typer.echo(f"smallest failing case: python {script_file}")
    return 0 if report.ok else FAILED


def _items(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(each.strip() for each in text.split(",") if each.strip())


def _sizes(option: str, text: str | None) -> tuple[int, ...] | None:
    items = _items(text)
    if items is None:
        return None
    if not all(each.isdecimal() for each in items):
        raise UserError(f"{option}: expected numbers such as 64,128, got {text!r}")
    return tuple(map(int, items))


def run_command(argv: Sequence[str] | None = None) -> int:
    """Parses the arguments and runs; returns the exit code."""
    from compiled_attn.testing.capabilities import CapabilityError

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(test)
    arguments = None if argv is None else list(argv)
    return exit_code_of(
        lambda: app(args=arguments, prog_name=_PROGRAM, standalone_mode=False),
        (CapabilityError,),
        "compiled_attn.testing",
    )
