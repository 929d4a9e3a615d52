"""A valid call of unified attention of which a test makes one argument invalid."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_attn import UnifiedMetadata, unified_attention
from tests.compiled_attn.attention.unified_run import bits, metadata_of
from tests.oracle import Scene, Shape

CACHES = ("key_cache", "value_cache", "key_scale", "value_scale")
FIELDS = {field.name for field in dataclasses.fields(UnifiedMetadata)}


class Call:
    """A legal call of a mixed step; `change` makes it another."""

    def __init__(self, **shape: Any) -> None:
        self.scene = Scene(1, Shape(**{"cache_dtype": torch.int8, **shape})).share_prefix(2)
        self.scene.add(1, 1, shared=True).add(0, 4, shared=True).add(9, 1).add(5, 3)
        metadata = metadata_of(self.scene, padding=3)
        query, key, value = self.scene.flat(len(metadata.slot_mapping))
        self.arguments: dict[str, Any] = {
            "query": query, "key": key, "value": value, **self.scene.caches, "scale": 0.25,
            "metadata": metadata,
        }  # fmt: skip

    def change(self, changes: dict[str, Any]) -> None:
        """Sets arguments, or fields of the metadata; a function makes the new from the old."""
        for name, new in changes.items():
            metadata = self.arguments["metadata"]
            if name in FIELDS:
                new = new(getattr(metadata, name)) if callable(new) else new
                self.arguments["metadata"] = dataclasses.replace(metadata, **{name: new})
            else:
                self.arguments[name] = new(self.arguments[name]) if callable(new) else new

    def refuses(self, error: type[Exception], match: str) -> None:
        """Asserts that the call raises, says what to do, and leaves every cache as it was."""
        caches = [*self.scene.caches.values(), *(self.arguments[name] for name in CACHES)]
        watched = [cache for cache in caches if isinstance(cache, Tensor) and not cache.is_meta]
        before = [bits(cache) for cache in watched]
        with pytest.raises(error, match=match) as raised:
            unified_attention(**self.arguments)
        assert type(raised.value) is error
        says = str(raised.value)
        assert "\n" not in says and says.index("expected") < says.index("got")
        assert len(says[says.index("got") :].partition(": ")[2]) > 10, f"no remedy: {says}"
        for cache, old in zip(watched, before, strict=True):
            assert torch.equal(bits(cache), old), "a cache was written"


def put(at: int, number: int) -> Callable[[Tensor], Tensor]:
    """Makes a copy of a tensor with one element changed."""

    def changed(tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        copy.view(-1)[at] = number
        return copy

    return changed


def of_another_size(tensor: Tensor) -> Tensor:
    return tensor[:-1]


def cases(error: type[Exception], *tables: dict[str, tuple[dict[str, Any], str]]):
    return [
        pytest.param(changes, error, match, id=name)
        for table in tables
        for name, (changes, match) in table.items()
    ]
