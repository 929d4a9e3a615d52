"""`cache`: look at a store of compiled artifacts, check it, and make it smaller."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from graphs.cli.errors import FAILED, UserError
from graphs.store import ArtifactStore, StoreError

__all__ = ["cache_app", "parse_bytes"]

_Store = Annotated[Path, typer.Option("--store", metavar="DIR", help="The store.")]
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def cache_app(default: str, error: type[Exception] = UserError) -> typer.Typer:
    """The commands, for a store that is at `default` unless told; bad input raises `error`."""
    app = typer.Typer(
        no_args_is_help=True, help="Compiled artifacts on disk: list, check, make smaller."
    )

    @app.command()
    def ls(
        store: _Store = Path(default),
        factors: Annotated[bool, typer.Option(help="Also print what each depends on.")] = False,
    ) -> int:
        """List artifacts and compile caches, the one used last first."""
        with _opened(store, error) as opened:
            _list(opened, factors)
        return 0

    @app.command()
    def verify(store: _Store = Path(default)) -> int:
        """Check every byte, and throw away what is damaged. Ends with 1 if anything was."""
        with _opened(store, error) as opened:
            problems = opened.verify()
            for name, problem in problems.items():
                typer.echo(f"{name[:40]}: {problem}; thrown away")
            kept = len(opened.entries()) + len(opened.inductor_caches())
        typer.echo(f"{kept} are as they were stored, {len(problems)} damaged files or entries")
        return FAILED if problems else 0

    @app.command()
    def prune(
        max_size: Annotated[
            str, typer.Option(metavar="SIZE", help="Bytes that may stay, such as 500M or 2G.")
        ],
        store: _Store = Path(default),
    ) -> int:
        """Remove what was not used for longest until the rest is no larger than SIZE."""
        with _opened(store, error) as opened:
            removed = opened.prune(parse_bytes(max_size))
            typer.echo(f"{_size(removed)} removed, {_size(opened.bytes)} left")
        return 0

    @app.command()
    def clear(store: _Store = Path(default)) -> int:
        """Remove everything that no process is using."""
        with _opened(store, error) as opened:
            typer.echo(f"{_size(opened.clear())} removed, {_size(opened.bytes)} left")
        return 0

    return app


def parse_bytes(text: str) -> int:
    """Read `500M`, `2G`, `0` or plain bytes.

    Raises:
        ValueError: it is something else.
    """
    found = re.fullmatch(r"([0-9]+)([KMG]?)", text.strip().upper().removesuffix("B"))
    if found is None:
        raise ValueError(f"expected a size such as 500M or 2G, got {text!r}")
    return int(found[1]) * _UNITS[found[2]]


@contextlib.contextmanager
def _opened(path: Path, error: type[Exception]) -> Iterator[ArtifactStore]:
    try:
        path = path.expanduser()
        if not (path / "store.json").exists():
            raise StoreError(f"there is no store in {path}: give its folder with --store DIR")
        yield ArtifactStore(path)
    except (StoreError, OSError, ValueError) as problem:
        raise error(str(problem)) from problem


def _list(store: ArtifactStore, factors: bool) -> None:
    for entry in store.entries():
        told = entry.factors
        what = f"{told.get('backend', '?')} {told.get('name', '')}".strip()
        typer.echo(f"{entry.key[:12]}  {_size(entry.bytes):>10}  {_age(entry.used)}  {what}")
        if factors:
            for name, value in sorted(told.items()):
                typer.echo(f"    {name}: {value}")
    for cache in store.inductor_caches():
        typer.echo(f"{cache.key[:12]}  {_size(cache.bytes):>10}  {_age(cache.used)}  kernels")
    typer.echo(f"{_size(store.bytes)} of {_size(store.max_bytes)} in {store.path}")


def _size(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"


def _age(used: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(used))
