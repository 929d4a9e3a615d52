"""Requests as their users give them: checked, never cast."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import takewhile
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiled_attn.cache.blocks.prefix import Salt
from compiled_attn.engine.config import ConfigError
from compiled_attn.engine.sampling import SamplingParams

__all__ = ["Workload", "check_settings", "token_ids"]

_FOREVER = 1e9
_REMEDY = "pass token ids, as the model's tokenizer gives them"


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests with their sampling and arrival times: each continuation of a prompt is one.

    Args:
        names: index of the prompt of each request, and which of its continuations it is.
        prompts: token ids of each request.
        sampling: how each is continued.
        salts: which prompts may share blocks: those of equal salt.
        arrivals: seconds from the start at which each arrives (open loop); None: all at once.
        concurrency: requests in flight at most (closed loop); None: no limit.
    """

    names: Sequence[tuple[int, int]]
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
        params = _one_each(sampling, SamplingParams, len(tokens), "SamplingParams")
        salts = _one_each(salt, (str, bytes, type(None)), len(tokens), "salts")
        times = None if arrivals is None else _seconds(arrivals, len(tokens))
        names = [
            (at, choice)
            for at, each in enumerate(params)
            for choice in range(getattr(each, "n", 1))
        ]
        return Workload(
            names,
            [[*tokens[at]] for at, _ in names],
            [_continuation(params[at], choice) for at, choice in names],
            [salts[at] for at, _ in names],
            None if times is None else [times[at] for at, _ in names],
            None if concurrency is None else int(concurrency),
        )

    def others(self, at: int) -> list[int]:
        """The further continuations of a prompt, given its first."""
        index, choice = self.names[at]
        same = takewhile(lambda other: self.names[other][0] == index, range(at, len(self.names)))
        return [] if choice else [*same][1:]


def _continuation(sampling: Any, choice: int) -> Any:
    """One of the continuations; what is no `SamplingParams` is refused later, with its prompt."""
    return sampling.continuation(choice) if isinstance(sampling, SamplingParams) else sampling


def token_ids(prompt: Any) -> list[int]:
    """The ids of one prompt as Python ints.

    Args:
        prompt: integers of Python or numpy in any order-keeping collection, a numpy array or a
            tensor ``[n]`` of any integer dtype.

    Raises:
        ConfigError: anything else: text, floats, booleans, another number of axes.
    """
    if isinstance(prompt, (Tensor, np.ndarray)):
        return _of_array(prompt)
    if isinstance(prompt, (str, bytes, bytearray, Mapping, Set)) or not isinstance(
        prompt, Iterable
    ):
        raise ConfigError(
            f"expected a prompt as a list of integers, got {type(prompt).__name__} "
            f"{_short(prompt)}: {_REMEDY}"
        )
    tokens = list(prompt)
    if set(map(type, tokens)) <= {int}:
        return tokens
    return [_of_item(token) for token in tokens]


def check_settings(sampling: Any, salt: Any, arrived_s: Any, *, has_text: bool) -> None:
    """Raises ConfigError where what comes with a prompt is of another kind, or needs a text."""
    if not isinstance(sampling, SamplingParams):
        raise ConfigError(f"expected SamplingParams, got {type(sampling).__name__}: make one")
    if sampling.stop and not has_text:
        raise ConfigError(
            f"expected no stop strings, as this engine has no tokenizer, got {sampling.stop}: use "
            "compiled_attn.LLM, or give the engine has_stop"
        )
    if sampling.n != 1:
        raise ConfigError(
            f"expected n = 1 for a request by itself, got {sampling.n}: take generate or stream"
        )
    if not isinstance(salt, (str, bytes, type(None))):
        raise ConfigError(
            f"expected a salt as str, bytes or None, got {type(salt).__name__}: pass its repr"
        )
    try:
        salt.encode() if isinstance(salt, str) else None
    except UnicodeEncodeError as error:
        raise ConfigError(f"expected a salt of text, got {salt!r}: pass bytes") from error
    is_time = isinstance(arrived_s, Real) and math.isfinite(arrived_s)
    if arrived_s is not None and not is_time:
        raise ConfigError(f"expected arrived_s in finite seconds, got {arrived_s!r}")


def _of_array(prompt: Tensor | np.ndarray[Any, Any]) -> list[int]:
    if prompt.ndim != 1 or not _is_integer(prompt):
        raise ConfigError(
            f"expected a prompt of integers of shape [n], got {prompt.dtype} of shape "
            f"{list(prompt.shape)}: {_REMEDY}"
        )
    try:
        tokens: list[int] = prompt.tolist()
    except Exception as error:  # a tensor without values of its own: meta, sparse
        raise ConfigError(
            f"expected a prompt with values, got {type(prompt).__name__}: {error}: {_REMEDY}"
        ) from error
    return tokens


def _is_integer(prompt: Tensor | np.ndarray[Any, Any]) -> bool:
    if isinstance(prompt, Tensor):
        return not (prompt.is_floating_point() or prompt.is_complex() or prompt.dtype is torch.bool)
    return prompt.dtype.kind in "iu" and not isinstance(prompt, np.ma.MaskedArray)


def _of_item(token: Any) -> int:
    if not isinstance(token, bool) and isinstance(token, Integral):
        return int(token)
    if isinstance(token, Tensor) and not token.ndim and _is_integer(token):
        return int(token)
    raise ConfigError(
        f"expected a prompt of integers, got {type(token).__name__} {_short(token)} in it: "
        f"{_REMEDY}"
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


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
