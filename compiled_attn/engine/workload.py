"""A set of requests, and how they arrive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from compiled_attn.blocks.prefix import Salt
from compiled_attn.engine.config import ConfigError
from compiled_attn.engine.prompts import token_ids
from compiled_attn.engine.sampling import SamplingParams

__all__ = ["Workload"]


_FOREVER = 1e9


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests with their sampling and arrival times.

    Args:
        prompts: token ids of each request.
        sampling: how each is continued.
        salts: which prompts may share blocks: those of equal salt.
        arrivals: seconds from the start at which each arrives (open loop); None: all at once.
        concurrency: requests in flight at most (closed loop); None: no limit.
    """

    prompts: Sequence[list[int]]
    sampling: Sequence[SamplingParams]
    salts: Sequence[Salt]
    arrivals: Sequence[float] | None
    concurrency: int | None

    @staticmethod
    def of(
        prompts: Any,
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        salt: Salt | Sequence[Salt],
        arrivals: Sequence[float] | None,
        concurrency: int | None,
    ) -> Workload:
        """The workload, with one sampling and one salt spread over all requests.

        Raises:
            ConfigError: prompts are not token ids, numbers of prompts, samplings, salts and
                arrivals differ, or concurrency < 1.
        """
        tokens = _all_token_ids(prompts)
        if sampling is None or isinstance(sampling, SamplingParams):
            sampling = [sampling or SamplingParams()] * len(tokens)
        salts = [salt] * len(tokens) if isinstance(salt, (str, bytes, type(None))) else salt
        for name, values in (
            ("SamplingParams", sampling),
            ("salts", salts),
            ("arrivals", arrivals),
        ):
            if values is not None and len(values) != len(tokens):
                raise ConfigError(
                    f"expected {len(tokens)} {name}, one per prompt, got {len(values)}"
                )
        if concurrency is not None and concurrency < 1:
            raise ConfigError(f"expected concurrency >= 1, got {concurrency}")
        if arrivals is not None and not all(0 <= at < _FOREVER for at in arrivals):
            raise ConfigError("expected arrivals of at least 0 seconds and below 31 years")
        return Workload(tokens, sampling, salts, arrivals, concurrency)


def _all_token_ids(prompts: Any) -> list[list[int]]:
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
        raise ConfigError(
            f"expected a list of prompts, each a list of token ids, got {type(prompts).__name__}: "
            "tokenize first, and put a single prompt into a list"
        )
    return [token_ids(prompt) for prompt in prompts]
