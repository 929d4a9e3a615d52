"""Which buckets this process captures next, while workers compile others beforehand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch

from graphs.buckets.space import Bucket
from graphs.capture.capture import resolve
from graphs.capture.contract import Backend, CaptureError
from graphs.capture.inputs import Input
from graphs.warmup.workers import Workers, one_thread, why_no_workers
from graphs.watch.sentinel import GraphBudgetExceeded

__all__ = ["NoWorkers", "precompiler", "shared", "stored"]


class NoWorkers(Exception):
    """Workers would be of no use; the text says why."""


def shared(
    todo: Sequence[Bucket], workers: int, precompile: Callable[[Bucket], None]
) -> Generator[Bucket]:
    """Give all of `todo` once: in order, but first what a worker got done with meanwhile."""
    with Workers(len(todo), workers, lambda job: precompile(todo[job])) as jobs:
        yield from (todo[job] for job in jobs)


def stored(
    todo: Sequence[Bucket],
    module: Callable[..., Any],
    make_inputs: Callable[[Bucket], Sequence[Input]],
    backend: str | Backend,
    options: Mapping[str, Any],
) -> list[Bucket]:
    """The buckets whose graphs a store in the back of the backend has: none is left to compile."""
    has: Any = getattr(backend, "has", None)
    found = []
    for bucket in todo if has else ():
        with contextlib.suppress(Exception), torch.no_grad():  # its capture will tell
            if has(module, make_inputs(bucket), **options):
                found.append(bucket)
    return found


def precompiler(
    module: Callable[..., Any],
    make_inputs: Callable[[Bucket], Sequence[Input]],
    backend: str | Backend,
    name_of: Callable[[Bucket], str],
    options: Mapping[str, Any],
) -> Callable[[Bucket], None]:
    """What compiles a bucket of a callable in a worker, having loaded here all that it needs.

    Raises:
        NoWorkers: the backend keeps nothing on disk, or this process cannot fork.
    """
    chosen: Any = _prepared(backend)

    def precompile(bucket: Bucket) -> None:
        with torch.no_grad():
            with one_thread():
                inputs = make_inputs(bucket)
            chosen.precompile(module, inputs, name=name_of(bucket), **options)

    return precompile


def _prepared(backend: str | Backend) -> Any:
    try:
        chosen: Any = resolve(backend, "workers")
        if not hasattr(chosen, "precompile"):
            raise NoWorkers(f"backend {chosen.name!r} keeps nothing on disk")
        if reason := chosen.why_no_precompile() or why_no_workers():
            raise NoWorkers(reason)
        chosen.prepare()
    except (NoWorkers, GraphBudgetExceeded):
        raise
    except CaptureError as error:
        raise NoWorkers(error.detail) from error
    except Exception as error:
        raise NoWorkers(f"{type(error).__name__}: {error}".split("\n")[0]) from error
    return chosen
