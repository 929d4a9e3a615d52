"""What stands in the place of a transformers cache: the step's states, or a recorder of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Carrier", "LayerStates", "StateCall", "StateRecorder", "StepStates"]


class Carrier:
    """An empty cache: a mixer then computes all of its tokens with the functions for prompts.

    Keys and values pass through: attention reads the paged cache.
    """

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        """Returns None: the state is read where the tokens are mixed."""

    def get_recurrent_state(self, *_: Any, **__: Any) -> None:
        """Returns None, see `get_conv_state`."""

    def update_conv_state(self, states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Returns the new tokens alone."""
        return states

    def update_recurrent_state(self, states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Ignores the state, which was written where the tokens were mixed."""
        return states

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Returns the new keys and values alone."""
        return keys, values

    def is_recording_past(self, *_: Any) -> bool:
        """No."""
        return False

    def has_previous_state(self, *_: Any) -> bool:
        """No."""
        return False

    def get_seq_length(self, *_: Any) -> int:
        """Returns 0; models get their positions as an argument."""
        return 0

    def get_query_offset(self, *_: Any) -> int:
        """Returns 0."""
        return 0

    def get_mask_sizes(self, queries: int, *_: Any) -> tuple[int, int]:
        """Returns the sizes of a mask of the new tokens alone."""
        return queries, 0


@dataclass(frozen=True)
class LayerStates(Carrier):
    """The states of one layer in a step, as its cache argument.

    Args:
        states: of each call in order, ``[slots, ...]``; written in place.
        slots: ``[R]`` int32 of the requests; 0: padding.
        seq_lens: ``[R]`` int32 tokens of each request with those of this step; 0: padding.
        query_start_loc: ``[R + 1]`` int32, rows of T of each request, as a running sum.
    """

    states: tuple[Tensor, ...]
    slots: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor


@dataclass(frozen=True)
class StepStates(Carrier):
    """A step as the cache argument of the model, for layers that get no other keywords.

    Args:
        paged: the step, a `PagedStep`.
    """

    paged: Any


@dataclass(frozen=True)
class StateCall:
    """One call that reads and writes a state.

    Args:
        module: the mixer.
        number: of the call in its layer.
        kind: "conv", "delta", "ssd" or "scan".
        shape, dtype: of the state of a request.
        problem: why it cannot be served, to end the sentence "a module that ..."; None: it can.
    """

    module: nn.Module | None
    number: int
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    problem: str | None = None


@dataclass
class StateRecorder(Carrier):
    """Records the calls; ``module`` is the mixer that runs."""

    calls: list[StateCall] = field(default_factory=list)
    module: nn.Module | None = None

    def __getattr__(self, name: str) -> Any:
        """Says what of a cache is missing here, in the words of a refusal."""
        raise AttributeError(f"it reads {name} of its cache, which a step does not have")

    def add(
        self,
        number: int,
        kind: str,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        problem: str | None = None,
    ) -> None:
        """Records a call of the current module."""
        self.calls.append(StateCall(self.module, number, kind, shape, dtype, problem))
