"""The engine that is simulated: its sizes, and how long its steps take."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["SimulatedEngine", "StepTime"]


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a simulated step: a sum over what it computes and reads.

    The defaults are a roofline of an 8-billion-parameter model (16-bit, grouped queries) on one
    data-centre accelerator: 1e15 operations and 3e12 bytes a second.

    Args:
        base: of any step.
        token: of each new token.
        pair: of each query and key that a prompt chunk compares.
        block_slot: of each slot of a cached block that one token reads.
    """

    base: float = 6e-3
    token: float = 15e-6
    pair: float = 1e-9
    block_slot: float = 44e-9


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """Sizes and policy of the engine that is simulated.

    Args:
        max_tokens: tokens of a step at most.
        max_seqs: requests that run at the same time at most (<= max_tokens).
        block_size: slots in a block.
        blocks: blocks of the pool, without the null block.
        time: how long steps take.

    Raises:
        ValueError: a size below 1, or more requests than tokens.
    """

    max_tokens: int = 256
    max_seqs: int = 32
    block_size: int = 32
    blocks: int = 2048
    time: StepTime = field(default_factory=StepTime)

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_seqs", "block_size", "blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}: enlarge it")
        if self.max_seqs > self.max_tokens:
            raise ValueError(
                f"expected max_seqs <= max_tokens, got {self.max_seqs} > {self.max_tokens}: every "
                "running request needs a token in a step"
            )
