"""Errors of this package, and helpers that quote user input in one short line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphs.watch.causes import CompileEvent

__all__ = [
    "BucketFileError",
    "BucketOverflow",
    "BucketedError",
    "CaptureError",
    "GraphBudgetExceeded",
    "InputMismatch",
    "JournalError",
    "LateFileError",
    "ModeMismatch",
    "NoOnnx",
    "StaleGraph",
    "StoreBusy",
    "StoreError",
    "UnsafeStore",
    "clipped",
    "parse_json",
    "quoted",
]


class CaptureError(RuntimeError):
    """A callable could not be captured, or graph `name` cannot run; `detail` has the reason."""

    def __init__(self, name: str, detail: str) -> None:
        self.name = name
        self.detail = detail
        super().__init__(f"{name}: {detail}")


class InputMismatch(CaptureError):
    """An input differs from the captured one: shape, dtype, device, stride, constant, or number."""


class ModeMismatch(CaptureError):
    """A global setting of torch (grad mode, threads, ...) differs from what was captured."""


class StaleGraph(CaptureError):
    """Something that the graph depends on besides its inputs has changed; the graph did not run."""


class NoOnnx(RuntimeError):
    """A graph cannot be exported to ONNX, or ONNX Runtime cannot run it."""


class GraphBudgetExceeded(RuntimeError):
    """Something would compile or be captured under a strict :class:`~graphs.no_compile`.

    Attributes:
        event: the function, its line, and the guard or tensor that caused it.
    """

    def __init__(self, event: CompileEvent) -> None:
        self.event = event
        super().__init__(str(self))

    def __reduce__(self) -> tuple[type[GraphBudgetExceeded], tuple[CompileEvent]]:
        # Workers send it to their parent; what passes through Dynamo is of a class made there.
        return GraphBudgetExceeded, (self.event,)

    def __str__(self) -> str:
        return (
            f"{self.event}; expected nothing to compile any more: {self.event.remedy}; or only "
            "count it: no_compile(strict=False)"
        )


class BucketOverflow(ValueError):
    """No bucket holds a need; attributes: `need`, `largest` bucket, and `remedy` if given."""

    def __init__(
        self, need: Mapping[str, int], largest: Mapping[str, int], remedy: str = ""
    ) -> None:
        self.need = dict(need)
        self.largest, self.remedy = largest, remedy
        sizes = " ".join(f"{name}={size}" for name, size in need.items())
        remedy = remedy or "cut the step into smaller ones, or add a larger bucket"
        super().__init__(f"need {sizes} fits no bucket, the largest is {largest}; {remedy}")


class BucketedError(ValueError):
    """A callable cannot run in buckets as asked for: its axes, outputs or padding do not fit."""


class BucketFileError(ValueError):
    """A bucket file is malformed; the message begins with `path:line:`."""


class LateFileError(ValueError):
    """A file of late work is malformed or another file; the message begins with `path:line:`."""


class JournalError(ValueError):
    """A journal cannot be used: it is another file, of another warmup, or of a newer version."""


class StoreError(RuntimeError):
    """A store cannot be used."""


class UnsafeStore(StoreError):
    """Other users can write to the store, so its code must not be run."""


class StoreBusy(StoreError):
    """Another process held the lock of the store for too long."""


def parse_json(text: str | bytes) -> Any:
    """Parse JSON from a user.

    Raises:
        ValueError: it is no JSON, nested too deeply, or has too long a number; the message is one
            short line.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at column {error.colno}") from None
    except UnicodeDecodeError:
        raise ValueError("not valid JSON: not UTF-8") from None
    except RecursionError:
        raise ValueError("JSON that is nested too deeply to be read") from None
    except ValueError:  # Python's own limit for the digits of an integer
        raise ValueError("JSON with a number of too many digits") from None


def quoted(value: object, most: int = 80) -> str:
    """`repr`, cut at about `most` characters; fast for long texts too."""
    if isinstance(value, str):
        return repr(value) if len(value) <= most else f"{value[:most]!r}..."
    return clipped(repr(value), most)


def clipped(text: str, most: int) -> str:
    """Cut a text at `most` characters and append `...`."""
    return text if len(text) <= most else f"{text[:most]}..."
