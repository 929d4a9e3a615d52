"""Examples of the inputs of a callable: its own, or those of its first call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphs.capture.inputs import parameters_of
from graphs.capture.structure import CallStructure
from graphs.errors import BucketedError

__all__ = ["by_keyword", "copied_call", "default_example"]


def default_example(
    function: Callable[..., Any], name: str
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return `dummy_inputs` of a module of transformers, with an attention mask.

    Raises:
        BucketedError: it has none.
    """
    dummy = getattr(function, "dummy_inputs", None)
    if not isinstance(dummy, Mapping):
        raise BucketedError(
            f"{name}: expected an example, got none: bucketed(module, example), "
            "or call it once before warmup()"
        )
    inputs = dict(dummy)
    ids, parameters = inputs.get("input_ids"), parameters_of(function)
    if isinstance(ids, Tensor) and "attention_mask" in parameters.keys() - inputs.keys():
        inputs["attention_mask"] = torch.ones_like(ids)
    device = next((each.device for each in function.parameters()), None)  # type: ignore[attr-defined]
    return (), {n: v.to(device) if isinstance(v, Tensor) else v for n, v in inputs.items()}


def copied_call(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    discrete: Collection[str],
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Copy the inputs of a call, but for `discrete` ones, so that later writes do not change them.

    Raises:
        TypeError: an input is of an unknown class.
    """
    given = {name: each for name, each in kwargs.items() if name not in discrete}
    structure = CallStructure(function, args, given)
    copies = [
        each.detach().clone() if isinstance(each, Tensor) else each for each in structure.leaves
    ]
    copied: tuple[Sequence[Any], Mapping[str, Any]] = structure.build(copies)
    return copied


def by_keyword(
    names: Sequence[str], discrete: Collection[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Pass inputs by keyword from the first on that is discrete.

    Args:
        names: of the parameters that take inputs by position.
        discrete: names of inputs.
        args, kwargs: of a call.
    """
    first = min((names.index(name) for name in discrete if name in names), default=len(args))
    moved = dict(zip(names[first:], args[first:], strict=False))
    if len(moved) < len(args[first:]) or moved.keys() & kwargs.keys():
        return args, dict(kwargs)  # an error of the caller
    return args[:first], {**moved, **kwargs}
