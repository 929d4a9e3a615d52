"""The result of a case."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from compiled_attn.testing.kit.cases import Case
from compiled_attn.testing.kit.step import Step
from compiled_attn.testing.kit.trial import Measured

__all__ = ["Result", "Status"]

Status = Literal["passed", "failed", "not claimed"]


@dataclass(frozen=True)
class Result:
    """Result of one case.

    Attributes:
        case: the case.
        status: passed, failed or not claimed.
        message: why it failed or was skipped, or a note.
        measured: maximum error and its tolerance; both 0 where bits are compared.
        steps: number of steps that ran.
        seconds: time that they took.
        step: step that failed, shrunk if the case is the first that failed.
    """

    case: Case
    status: Status
    message: str = ""
    measured: Measured = field(default_factory=Measured)
    steps: int = 0
    seconds: float = 0.0
    step: Step | None = None

    @property
    def text(self) -> str:
        """Describes a failure in a few lines."""
        return (
            f"{self.case.name}: a kernel must guarantee that {self.case.guarantee}\n"
            f"  {self.message}\n  step: {self.step}"
        )
