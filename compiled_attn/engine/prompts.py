"""Requests as their users give them: checked, never cast."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiled_attn.engine.config import ConfigError
from compiled_attn.engine.sampling import SamplingParams
from compiled_attn.engine.sizing import Sizing

__all__ = ["check_fits", "check_settings", "token_ids"]

_REMEDY = "pass token ids, as the model's tokenizer gives them"


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


def check_fits(sizing: Sizing, prompt: Sequence[int], sampling: SamplingParams) -> None:
    """Raises ConfigError if the request can never be served, whatever else runs."""
    if not prompt:
        raise ConfigError("expected a prompt of at least one token, got none")
    if min(prompt) < 0 or max(prompt) >= sizing.vocab:
        raise ConfigError(
            f"expected token ids in 0..{sizing.vocab - 1}, got {min(prompt)}..{max(prompt)}: "
            "tokenize with the model's own tokenizer"
        )
    _check_tokens(sizing.vocab, "a logit_bias for", dict(sampling.logit_bias))
    if sampling.min_tokens:
        _check_tokens(sizing.vocab, "min_tokens with stop_token_ids of", sampling.stop_token_ids)
    sizing.check_lengths(len(prompt), sampling.max_new_tokens)


def _check_tokens(vocab: int, what: str, tokens: Iterable[int]) -> None:
    for token in tokens:
        if not 0 <= token < vocab:
            raise ConfigError(
                f"expected {what} token ids in 0..{vocab - 1}, got {token}: leave it out"
            )


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
