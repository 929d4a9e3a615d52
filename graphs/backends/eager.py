"""The callable itself: the reference that every other backend is compared with."""

from __future__ import annotations

from graphs.capture.contract import Backend, Frozen, Job

__all__ = ["EagerBackend"]


class EagerBackend(Backend):
    """Runs the callable as it is, after the same checks as a compiled graph."""

    name = "eager"

    def capture(self, job: Job) -> Frozen:
        """Run the callable `warm_runs` times, so that an error shows now."""
        return job.warm_up(Frozen(job.function))
