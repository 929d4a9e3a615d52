"""One request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from compiled_attn.engine.sampling import SamplingParams

__all__ = ["GenerationResult", "Sequence", "Status", "TokenEvent"]


class Status(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A finished request.

    ``finish_reason`` is "stop" (end-of-sequence or stop token) or "length". Times are seconds since
    the
    request arrived: ``ttft_s`` to its first token, ``latency_s`` to its last.
    """

    index: int
    prompt: list[int]
    tokens: list[int]
    finish_reason: str
    ttft_s: float
    latency_s: float
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token; ``result`` is set with the last one of its request."""

    index: int
    token: int
    result: GenerationResult | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's tokens and how far they are computed.

    ``tokens`` is the prompt followed by what was generated; ``computed`` of them have keys and
    values in the cache. A preempted sequence goes back to ``computed = 0`` and keeps its tokens.
    """

    index: int
    tokens: list[int]
    prompt_len: int
    sampling: SamplingParams
    arrived_s: float
    computed: int = 0
    status: Status = Status.WAITING
    first_token_s: float | None = None
    finish_reason: str | None = None
    stop_tokens: frozenset[int] = field(default_factory=frozenset)

    @property
    def remaining(self) -> int:
        """Tokens that are known but not computed: 1 for a decode."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_len

    def append(self, token: int, now_s: float) -> None:
        """Takes a generated token, and decides whether it ends the request."""
        self.tokens.append(token)
        if self.first_token_s is None:
            self.first_token_s = now_s
        if token in self.stop_tokens:
            self.finish_reason = "stop"
        elif self.generated >= self.sampling.max_new_tokens:
            self.finish_reason = "length"

    def result(self, now_s: float) -> GenerationResult:
        """The finished request."""
        first = now_s if self.first_token_s is None else self.first_token_s
        return GenerationResult(
            self.index,
            self.tokens[: self.prompt_len],
            self.tokens[self.prompt_len :],
            self.finish_reason or "length",
            first - self.arrived_s,
            now_s - self.arrived_s,
            self.sampling,
        )
