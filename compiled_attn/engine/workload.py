"""A set of requests, and how they arrive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from compiled_attn.cache.blocks.prefix import Salt
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
        concurrency: Any,
    ) -> Workload:
        """The workload, with one sampling and one salt spread over all requests.

        Raises:
            ConfigError: prompts are not token ids, numbers of prompts, samplings, salts and
                arrivals differ, or concurrency < 1.
        """
        tokens = _all_token_ids(prompts)
        if concurrency is not None and not (
            isinstance(concurrency, Integral) and int(concurrency) >= 1
        ):
            raise ConfigError(f"expected concurrency: None or an integer >= 1, got {concurrency!r}")
        sampling = SamplingParams() if sampling is None else sampling
        return Workload(
            tokens,
            _one_each(sampling, SamplingParams, len(tokens), "SamplingParams"),
            _one_each(salt, (str, bytes, type(None)), len(tokens), "salts"),
            None if arrivals is None else _seconds(arrivals, len(tokens)),
            None if concurrency is None else int(concurrency),
        )


def _all_token_ids(prompts: Any) -> list[list[int]]:
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
        raise ConfigError(
            f"expected a list of prompts, each a list of token ids, got {type(prompts).__name__}: "
            "tokenize first, and put a single prompt into a list"
        )
    return [token_ids(prompt) for prompt in prompts]


def _one_each(given: Any, one: type | tuple[type, ...], count: int, name: str) -> list[Any]:
    """A list of ``count``: what is given, or that many of the one that is given."""
    if isinstance(given, one):
        return [given] * count
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        raise ConfigError(f"expected {name}, one or one per prompt, got {type(given).__name__}")
    values = list(given)
    if len(values) != count:
        raise ConfigError(f"expected {count} {name}, one per prompt, got {len(values)}")
    return values


def _seconds(arrivals: Any, count: int) -> list[float]:
    values = _one_each(arrivals, (), count, "arrivals")
    try:
        seconds = [float(value) for value in values]
    except (TypeError, ValueError, OverflowError):
        seconds = [-1.0]
    if not all(0 <= at < _FOREVER for at in seconds):
        raise ConfigError("expected arrivals in seconds, of at least 0 and below 31 years")
    return seconds
