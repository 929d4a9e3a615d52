"""Results of a warmup: events while it runs, and the report at the end."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from graphs.buckets.space import Bucket

__all__ = ["BucketEvent", "BucketResult", "WarmupReport"]

Status: TypeAlias = Literal["captured", "failed", "skipped"]
EventStatus: TypeAlias = Literal["started", "captured", "failed", "skipped", "interrupted"]


@dataclass(frozen=True)
class BucketResult:
    """The result of one bucket.

    Attributes:
        status: `captured`; `failed`, with the cause in `error`; `skipped`, since the budget was
            spent.
        seconds: of the capture, also of one that failed.
        bytes: growth of the memory in use.
        compiles: how often Dynamo compiled.
        error: one line, empty if captured.
        run_seconds: median seconds of one run, see `timed_runs` of :class:`~graphs.WarmupManager`;
            None if not measured.
        name: of the callable.
        is_loaded: whether the graph came from a store, and was not compiled.
        graph: name of the compiled graph; buckets with the same name share it.
        why_alone: why the bucket does not share the graph of its shape group; else empty.
    """

    bucket: Bucket
    status: Status
    seconds: float = 0.0
    bytes: int = 0
    compiles: int = 0
    error: str = ""
    run_seconds: float | None = None
    name: str = ""
    is_loaded: bool = False
    graph: str = ""
    why_alone: str = ""


@dataclass(frozen=True)
class BucketEvent:
    """Passed to `progress` when a bucket is `started`, and when it is done.

    `interrupted` comes last if an exception such as KeyboardInterrupt ends the warmup.

    Attributes:
        index: of the bucket in the order of this warmup, from 0.
        total: how many buckets this warmup has.
        seconds: of this bucket.
        elapsed_seconds: since the warmup began.
        eta_seconds: estimate for the rest, from the done buckets and an earlier warmup; None while
            neither is known.
        name: of the callable.
    """

    bucket: Bucket
    status: EventStatus
    index: int
    total: int
    elapsed_seconds: float
    eta_seconds: float | None = None
    seconds: float = 0.0
    bytes: int = 0
    compiles: int = 0
    error: str = ""
    name: str = ""

    @property
    def is_last(self) -> bool:
        """Whether no event follows."""
        done = self.status != "started" and self.index == self.total - 1
        return done or self.status == "interrupted"


@dataclass(frozen=True)
class WarmupReport:
    """Results of all buckets; `str` is a summary, with a line for each that is not captured."""

    results: tuple[BucketResult, ...]
    elapsed_seconds: float

    @property
    def captured(self) -> tuple[BucketResult, ...]:
        """Captured buckets."""
        return self._with("captured")

    @property
    def failed(self) -> tuple[BucketResult, ...]:
        """Buckets whose capture failed."""
        return self._with("failed")

    @property
    def skipped(self) -> tuple[BucketResult, ...]:
        """Buckets that the budgets left out."""
        return self._with("skipped")

    @property
    def loaded(self) -> tuple[BucketResult, ...]:
        """Buckets whose graphs came from a store."""
        return tuple(result for result in self.results if result.is_loaded)

    @property
    def graphs(self) -> int:
        """How many compiled graphs serve the captured buckets."""
        return len({result.graph or (result.name, result.bucket) for result in self.captured})

    @property
    def seconds(self) -> float:
        """Sum of the seconds of all buckets."""
        return sum(result.seconds for result in self.results)

    @property
    def bytes(self) -> int:
        """Growth of the memory in use."""
        return sum(result.bytes for result in self.results)

    @property
    def compiles(self) -> int:
        """How often Dynamo compiled."""
        return sum(result.compiles for result in self.results)

    @property
    def cost(self) -> tuple[tuple[Bucket, float], ...]:
        """Seconds of one run of each measured bucket, for a planner."""
        return tuple((r.bucket, r.run_seconds) for r in self.results if r.run_seconds is not None)

    def to_json(self) -> dict[str, Any]:
        """The report as plain dicts, lists, numbers and strings."""
        return {
            "seconds": self.seconds,
            "elapsed_seconds": self.elapsed_seconds,
            "bytes": self.bytes,
            "compiles": self.compiles,
            "graphs": self.graphs,
            "buckets": [{**asdict(r), "bucket": dict(r.bucket)} for r in self.results],
        }

    def __str__(self) -> str:
        shared = f"{self.graphs} graphs, " if self.graphs < len(self.captured) else ""
        lines = [
            f"{len(self.captured)} of {len(self.results)} buckets captured in "
            f"{self.elapsed_seconds:.1f} s, "
            f"{shared}{self.compiles} compiles, {self.bytes / 2**20:.1f} MiB"
        ]
        lines += [f"  {r.bucket}: {r.why_alone}" for r in self.results if r.why_alone]
        lines += [f"  {r.bucket}: {r.status}: {r.error}" for r in (*self.failed, *self.skipped)]
        return "\n".join(lines)

    def _with(self, status: Status) -> tuple[BucketResult, ...]:
        return tuple(result for result in self.results if result.status == status)
