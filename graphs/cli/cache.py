"""`cache`: list, verify and shrink a store of compiled graphs."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphs.cli.errors import FAILED, UserError
from graphs.errors import StoreError

if TYPE_CHECKING:
    from graphs.store.store import ArtifactStore

__all__ = ["cache_app"]

_Store = Annotated[Path | None, typer.Option("--store", metavar="DIR", help="The store.")]
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_HEAD = ("entry", "size", "age", "last used", "model", "backend, graph and bucket")


def cache_app(default: str, *, find: Callable[[], Path] | None = None) -> typer.Typer:
    """The app of the commands `ls`, `verify`, `prune` and `clear`.

    Args:
        default: folder of the default store, for the help text.
        find: returns that folder, which may depend on variables and the platform.
    """
    app = typer.Typer(
        no_args_is_help=True,
        help=f"List, verify and shrink the compiled graphs in {default}, or in the cache folder "
        "that XDG_CACHE_HOME or the platform gives.",
    )

    @contextlib.contextmanager
    def opened(store: Path | None) -> Iterator[ArtifactStore]:
        try:
            yield _existing(store or (find() if find else Path(default)))
        except (StoreError, OSError, ValueError) as problem:
            raise UserError(str(problem)) from problem

    @app.command()
    def ls(
        store: _Store = None,
        factors: Annotated[bool, typer.Option(help="Also print the factors of each key.")] = False,
    ) -> int:
        """List artifacts and compile caches, most recently used first."""
        with opened(store) as artifacts:
            _list(artifacts, factors)
        return 0

    @app.command()
    def verify(store: _Store = None) -> int:
        """Check every byte and discard what is damaged. The exit code is 1 if anything was."""
        with opened(store) as artifacts:
            problems = artifacts.verify()
            for name, problem in problems.items():
                typer.echo(f"{name[:40]}: {problem}; discarded")
            intact = len(artifacts.entries()) + len(artifacts.inductor_caches())
        typer.echo(f"{intact} intact, {len(problems)} damaged files or entries discarded")
        return FAILED if problems else 0

    @app.command()
    def prune(
        max_size: Annotated[str, typer.Option(metavar="SIZE", help="Limit such as 500M or 2G.")],
        store: _Store = None,
    ) -> int:
        """Evict the least recently used until at most SIZE is left."""
        with opened(store) as artifacts:
            removed = artifacts.prune(parse_bytes(max_size))
            typer.echo(f"{_size(removed)} removed, {_size(artifacts.bytes)} left")
        return 0

    @app.command()
    def clear(store: _Store = None) -> int:
        """Remove everything that no process is using."""
        with opened(store) as artifacts:
            typer.echo(f"{_size(artifacts.clear())} removed, {_size(artifacts.bytes)} left")
        return 0

    return app


def parse_bytes(text: str) -> int:
    """Parse `500M`, `2G` or a number of bytes.

    Raises:
        ValueError: it is something else.
    """
    found = re.fullmatch(r"([0-9]+)([KMG]?)", text.strip().upper().removesuffix("B"))
    if found is None:
        raise ValueError(f"expected a size such as 500M or 2G, got {text!r}")
    return int(found[1]) * _UNITS[found[2]]


def _existing(path: Path) -> ArtifactStore:
    from graphs.store.store import ArtifactStore

    path = path.expanduser()
    if not (path / "store.json").exists() and not (path / "artifacts").is_dir():
        raise StoreError(f"there is no store in {path}: give its folder with --store DIR")
    return ArtifactStore(path)


def _list(store: ArtifactStore, factors: bool) -> None:
    entries, now = store.entries(), time.time()
    rows: list[Sequence[str]] = [_HEAD]
    for entry in entries:
        label, found = entry.label, entry.factors
        age = "-" if label.made is None else _ago(now - label.made)
        graph = f"{found.get('backend', '?')} {label.name or found.get('name', '-')}"
        times = age, _ago(now - entry.used)
        rows.append((entry.key[:12], _size(entry.bytes), *times, label.model or "-", graph))
    for cache in store.inductor_caches():
        used = _ago(now - cache.used) if cache.used else "-"
        rows.append((cache.key[:12], _size(cache.bytes), "-", used, "-", "kernels of inductor"))
    lines = _aligned(rows) if len(rows) > 1 else []
    for number, line in enumerate(lines):
        typer.echo(line)
        if factors and 1 <= number <= len(entries):
            for name, value in sorted(entries[number - 1].factors.items()):
                typer.echo(f"    {name}: {value}")
    typer.echo(f"{_size(store.bytes)} of {_size(store.max_bytes)} in {store.path}")


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _size(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"


def _ago(seconds: float) -> str:
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
