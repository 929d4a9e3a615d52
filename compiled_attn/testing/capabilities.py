"""What a paged attention kernel claims to support."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from graphs.errors import quoted

__all__ = ["DTYPES", "FEATURES", "Capabilities", "CapabilityError", "unknown_feature"]

FEATURES: Mapping[str, str] = MappingProxyType({
    "chunked": "several queries of a request, after tokens that the cache already holds",
    "mixed": "prompts and decodes in one call",
    "shared_prefix": "two requests read the same blocks",
    "window": "a sliding window",
    "softcap": "scores are capped, cap * tanh(score / cap)",
    "sinks": "attention sinks: an extra logit per head in the softmax, without a value",
    "alibi": "a bias that is linear in the distance, with a slope for each head",
    "mla": "values with another head size than keys, or values that are a part of the keys",
    "int8": "int8 caches with a scale for each slot and KV head",
    "fp8_e4m3": "float8_e4m3fn caches with scales",
    "fp8_e5m2": "float8_e5m2 caches with scales",
    "noncausal": "queries see all keys of their request",
    "lse": "returns the log-sum-exp of the scores",
    "append": "the call writes new keys and values to the cache, then attends",
    "rotary": "applies rotary embeddings to new keys and queries",
    "padding_rows": "rows of the batch, or query rows, that belong to no request",
    "empty_rows": "a request whose sequence length is 0",
    "strided": "caches, tables and queries that are views of larger tensors",
    "int64_tables": "block tables and lengths in int64",
    "replay": "captured once, then replayed with other metadata in the same buffers",
})  # fmt: skip
"""Description of each feature, by name."""

DTYPES: Mapping[str, torch.dtype] = MappingProxyType({
    "float16": torch.float16, "bfloat16": torch.bfloat16,
    "float32": torch.float32, "float64": torch.float64,
})  # fmt: skip
"""Dtypes of queries, by name."""


class CapabilityError(ValueError):
    """A claim is unknown, invalid, or one that the interface cannot express."""


@dataclass(frozen=True)
class Capabilities:
    """What a kernel claims to support; the kit tests that, and reports the rest as not claimed.

    Args:
        features: supported features, names in `FEATURES`.
        dtypes: of queries, and of caches that are not quantised.
        head_dims: head sizes to test.
        block_sizes: block sizes to test, in tokens.
        groups: query heads per KV head to test.
        device: device of all tensors.

    Raises:
        CapabilityError: an unknown feature, no dtype, or sizes that are not positive ints.
    """

    features: frozenset[str] = frozenset()
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    head_dims: tuple[int, ...] = (16,)
    block_sizes: tuple[int, ...] = (16,)
    groups: tuple[int, ...] = (1, 4)
    device: str = "cpu"

    def __post_init__(self) -> None:
        # As `dict(features={"window"}, dtypes=[...])` of a module that does not import this class.
        object.__setattr__(self, "features", frozenset(_items("features", self.features)))
        for name in sorted(map(str, self.features)):
            if name not in FEATURES:
                raise unknown_feature(name, FEATURES)
        object.__setattr__(self, "dtypes", tuple(map(_dtype, _items("dtypes", self.dtypes))))
        if not self.dtypes:
            raise CapabilityError("dtypes: expected at least one dtype, got none: name one")
        for name in ("head_dims", "block_sizes", "groups"):
            sizes = tuple(_items(name, getattr(self, name)))
            if not sizes or any(type(size) is not int or size < 1 for size in sizes):
                raise CapabilityError(
                    f"{name}: expected one or more positive ints, got {quoted(sizes)}: name the "
                    "sizes that the kernel supports"
                )
            object.__setattr__(self, name, sizes)

    @classmethod
    def of(cls, declared: Capabilities | Mapping[str, Any]) -> Capabilities:
        """Returns declared capabilities, which may be a dict of the arguments.

        Raises:
            CapabilityError: they are neither, or invalid.
        """
        if isinstance(declared, Capabilities):
            return declared
        if not isinstance(declared, Mapping):
            raise CapabilityError(
                f"capabilities: expected Capabilities or a dict, got {quoted(declared)}: see "
                "compiled_attn.testing.Capabilities"
            )
        known = [each.name for each in dataclasses.fields(cls)]
        for name in declared:
            if name not in known:
                raise CapabilityError(
                    f"capabilities: expected one of {', '.join(known)}, got {quoted(name)}: "
                    "rename it, or leave it out"
                )
        return cls(**declared)

    def __contains__(self, feature: object) -> bool:
        return feature in self.features

    def replace(self, **changes: Any) -> Capabilities:
        """Returns a copy with some arguments replaced."""
        return dataclasses.replace(self, **changes)


def unknown_feature(name: str, known: Iterable[str], where: str = "") -> CapabilityError:
    """Returns the error of a feature that is not among the known ones."""
    return CapabilityError(
        f"unknown capability {quoted(name)}{where}: expected one of {', '.join(known)}"
    )


def _items(name: str, given: Any) -> list[Any]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise CapabilityError(
            f"{name}: expected a tuple or set, got {quoted(given)}: put it into a tuple"
        )
    return list(given)


def _dtype(given: Any) -> torch.dtype:
    found = DTYPES.get(given) if isinstance(given, str) else given
    if found not in DTYPES.values():
        raise CapabilityError(f"dtypes: expected some of {', '.join(DTYPES)}, got {quoted(given)}")
    assert isinstance(found, torch.dtype)
    return found
