"""Example inputs, from the command line or from a function of the user's module."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from graphs.buckets.space import Bucket
from graphs.capture.inputs import Input
from graphs.capture.memory import machine_bytes
from graphs.cli.errors import UserError, users_code
from graphs.cli.target import Target

__all__ = ["inputs_of", "make_inputs_of", "parse_bucket", "parse_input"]

_SHAPE = re.compile(r"(?:\d+(?:x\d+)*)?", re.ASCII)
_WORDS: dict[str, Input] = {"none": None, "true": True, "false": False}


def parse_input(text: str) -> Input:
    """Make the input that an `--input` option describes.

    `2x8:int64` is a tensor of that shape and dtype (default float32), `:float32` a scalar tensor.
    Integers are zeros, which are valid indices, floats are ones. `=3`, `=0.5`, `=true`, `=none` and
    `=text` are constants.

    Raises:
        UserError: the text is none of these.
    """
    if text.startswith("="):
        return _constant(text[1:])
    shape, colon, name = text.partition(":")
    dtype = getattr(torch, name if colon else "float32", None)
    if not _SHAPE.fullmatch(shape) or not (shape or colon) or not isinstance(dtype, torch.dtype):
        raise UserError(
            f"--input is {text!r}: expected SHAPE:DTYPE such as 2x8:float32, or =CONSTANT"
        )
    sizes = [int(size) for size in shape.split("x") if size]
    needed, available = math.prod(sizes) * dtype.itemsize, machine_bytes()
    if available is not None and needed > available:
        raise UserError(f"--input {text} takes {needed:,} bytes, but there are {available:,}")
    fill = torch.ones if dtype.is_floating_point or dtype.is_complex else torch.zeros
    try:
        return fill(sizes, dtype=dtype)
    except (RuntimeError, TypeError, OverflowError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"--input {text} cannot be made: {reason}") from error


def parse_bucket(text: str) -> Bucket:
    """Parse `rows=4,length=16`; spaces may replace the commas."""
    pairs = [word.partition("=") for word in text.replace(",", " ").split()]
    if not pairs or not all(name.isidentifier() and size.isdecimal() for name, _, size in pairs):
        raise UserError(f"--bucket is {text!r}: expected sizes by name, such as rows=4,length=16")
    return Bucket(**{name: int(size) for name, _, size in pairs})


def inputs_of(target: Target, name: str, bucket: Bucket | None) -> tuple[Input, ...]:
    """Call function `name` of the target's module, with the bucket if it takes one.

    Raises:
        UserError: there is no such function, it needs a bucket, it fails, or returns no inputs.
    """
    function = _function(target, name)
    try:
        wants_bucket = bool(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        wants_bucket = bucket is not None
    if wants_bucket and bucket is None:
        raise UserError(f"{name} takes a bucket: say which, such as --bucket rows=4,length=16")
    return _made(function, name, (bucket,) if wants_bucket else ())


def make_inputs_of(target: Target, name: str) -> Callable[[Bucket], Sequence[Input]]:
    """Function `name` of the target's module, which makes the inputs of a bucket.

    Raises:
        UserError: there is no such function; the returned one raises it as :func:`inputs_of` does.
    """
    function = _function(target, name)
    return lambda bucket: _made(function, name, (bucket,))


def _function(target: Target, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] | None = getattr(target.module, name, None)
    if not callable(function):
        raise UserError(
            f"{target.module.__name__} has no function {name} that makes the inputs: write one, or "
            "name another with --inputs"
        )
    return function


def _made(
    function: Callable[..., Any], name: str, arguments: tuple[Bucket | None, ...]
) -> tuple[Input, ...]:
    with users_code(f"{name}({', '.join(map(str, arguments))})"):
        made = function(*arguments)
    if isinstance(made, Tensor):
        return (made,)
    if not isinstance(made, (list, tuple)):
        raise UserError(f"{name} returned a {type(made).__name__}; expected a tuple of inputs")
    return tuple(made)


def _constant(text: str) -> Input:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
