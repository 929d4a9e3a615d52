"""The most tokens that a step of an engine computes: as it was given, or chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from compiled_attn.engine.config import EngineConfig
from graphs.backends import BACKENDS

__all__ = ["StepSize"]

_ONE_COMPILE, _COMPILE_EACH = 512, 256


@dataclass(frozen=True, slots=True)
class StepSize:
    """The most tokens that a step computes, and why.

    Args:
        tokens: decodes and chunks of prompts together.
        why: what decided.
    """

    tokens: int
    why: str

    @staticmethod
    def of(config: EngineConfig, symbolic: Sequence[str]) -> StepSize:
        """The size as configured, or else what the graphs cost that it takes.

        Larger steps read the weights less often for a prompt, and keep those that decode waiting
        for longer. By default 512 where one compile serves all buckets, so that one bucket more
        costs next to nothing; 256 where each is compiled; no more than the buckets hold, and no
        less than `max_seqs`.

        Args:
            config: of the engine.
            symbolic: axes whose sizes a graph may leave open, see `StepForm.symbolic`.
        """
        if config.max_tokens_per_step is not None:
            return StepSize(config.max_tokens_per_step, "max_tokens_per_step")
        size = StepSize(_COMPILE_EACH, "a compile for each bucket")
        if symbolic and _has_symbols(config):
            size = StepSize(_ONE_COMPILE, "one compile for all buckets")
        if config.buckets is not None and (held := _held(config)) < size.tokens:
            size = StepSize(held, "the largest bucket")
        return max(size, StepSize(config.max_seqs, "max_seqs"), key=lambda each: each.tokens)

    def within(self, tokens: int) -> StepSize:
        """The size where no step can have more than so many tokens."""
        if self.tokens <= tokens:
            return self
        return StepSize(tokens, "slots of the pool, or tokens of max_seqs contexts")

    def to_dict(self) -> dict[str, object]:
        """The size as JSON-able values."""
        return asdict(self)


def _has_symbols(config: EngineConfig) -> bool:
    backend = config.backend
    found = BACKENDS.get(backend) if isinstance(backend, str) else backend
    return found is not None and not found.why_no_symbolic()


def _held(config: EngineConfig) -> int:
    return max((bucket.get("tokens", 0) for bucket in config.buckets or ()), default=0)
