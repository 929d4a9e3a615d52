"""A value that is not finite, in one element of a scene; and the rows that it may hurt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_attn import BatchBuilder, UnifiedMetadata
from tests.compiled_attn.attention.unified_run import metadata_of
from tests.oracle import LARGEST, Scene


class Element(NamedTuple):
    """An element of an argument of unified attention, that of one token of one request."""

    argument: str
    request: int
    position: int
    at: tuple[int, ...]

    def poisoned(self, arguments: dict[str, Any], poison: float) -> dict[str, Any]:
        """Copies of the arguments, one element of them not finite."""
        copies = {k: v.clone() if isinstance(v, Tensor) else v for k, v in arguments.items()}
        copies[self.argument][self.at] = poison
        return copies


def both_metadata(scene: Scene, padding: int = 3, **options: Any) -> UnifiedMetadata:
    """The step as parts and request by request, padded."""
    parts = metadata_of(scene, padding=padding, **options)
    size = scene.shape.block_size
    builder = BatchBuilder(scene.shape.num_blocks, size)
    longest = max(request.context_len + len(request.tokens) for request in scene.requests)
    bucket = {"tokens": len(parts.slot_mapping), "requests": len(scene.requests) + padding}
    step = builder.plan_tables(scene.requests).fill(bucket, -(-longest // size) + 1).metadata(size)
    return replace(
        parts,
        block_tables=step.block_tables,
        seq_lens=step.seq_lens,
        query_start_loc=step.query_start_loc,
    )


def arguments_of(scene: Scene, metadata: UnifiedMetadata) -> dict[str, Any]:
    """Tensors of a call."""
    query, key, value = scene.flat(len(metadata.slot_mapping))
    return {"query": query, "key": key, "value": value, **scene.caches}


def elements(scene: Scene) -> Iterator[Element]:
    """In each request the first and the last cached token and new token, in every argument."""
    size, first_row = scene.shape.block_size, 0
    new = ["query", "key"] + ["value"] * (not scene.shape.latent)
    quantised = scene.shape.stored in LARGEST
    cached = [f"key_{'scale' if quantised else 'cache'}"]
    cached += [name.replace("key", "value") for name in cached] * (not scene.shape.latent)
    if quantised and scene.shape.stored.is_floating_point:  # codes that are NaN
        cached += [name.replace("scale", "cache") for name in cached]
    head = scene.shape.kv_heads - 1
    for index, request in enumerate(scene.requests):
        context, count = request.context_len, len(request.tokens)
        for position in {0, context - 1} & set(range(context)):
            slot = int(request.block_table[position // size]) * size + position % size
            for name in cached:
                at = (slot, head) if name.endswith("scale") else (slot, head, 1)
                yield Element(name, index, position, at)
        for row in {0, count - 1}:
            for name in new:
                yield Element(name, index, context + row, (first_row + row, head, 1))
        first_row += count


def hurt_rows(scene: Scene, element: Element, window: int | None = None) -> Tensor:
    """The new tokens that see an element, ``[tokens]`` bool: of a query its own row alone."""
    size = scene.shape.block_size
    column = element.position // size
    block = scene.requests[element.request].block_table[column]
    rows = []
    for index, request in enumerate(scene.requests):
        table, own = request.block_table, index == element.request
        end = request.context_len + (len(request.tokens) if own else 0)
        reads = element.position < end and column < len(table) and table[column] == block
        for position in range(request.context_len, request.context_len + len(request.tokens)):
            if element.argument == "query":
                rows.append(own and position == element.position)
            else:
                inside = window is None or position - element.position < window
                rows.append(bool(reads and element.position <= position and inside))
    return torch.tensor(rows)
