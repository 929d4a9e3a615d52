"""Prompts as lists of token ids: checked, never cast."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiled_attn.engine.config import ConfigError

__all__ = ["token_ids"]

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


def _of_array(prompt: Tensor | np.ndarray[Any, Any]) -> list[int]:
    if prompt.ndim != 1 or not _is_integer(prompt):
        raise ConfigError(
            f"expected a prompt of integers of shape [n], got {prompt.dtype} of shape "
            f"{list(prompt.shape)}: {_REMEDY}"
        )
    tokens: list[int] = prompt.tolist()
    return tokens


def _is_integer(prompt: Tensor | np.ndarray[Any, Any]) -> bool:
    if isinstance(prompt, Tensor):
        return not (prompt.is_floating_point() or prompt.is_complex() or prompt.dtype is torch.bool)
    return prompt.dtype.kind in "iu"


def _of_item(token: Any) -> int:
    if not isinstance(token, (bool, np.bool_)):
        try:
            return operator.index(token)
        except TypeError:
            pass
    raise ConfigError(
        f"expected a prompt of integers, got {type(token).__name__} {_short(token)} in it: "
        f"{_REMEDY}"
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
