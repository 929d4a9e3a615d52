"""Global memory traffic of a launch of the Triton op, computed from its sizes and plan.

Bytes are those that programs request, before any cache: each load or store of a program counts its
distinct elements once. ``floor`` is what no kernel avoids: each visible key and value, query and
output once. Programs of the same request and KV head read the same keys, mostly from L2, so the
traffic of prompts with device memory is near the floor and far below the requests.

Left out: ``query_start_loc`` and ``seq_lens``, of which a program searches 4 bytes at a time, and
slopes and sinks, of which it reads one float for each of its heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from compiled_attn.ops.call import PagedCall
from compiled_attn.ops.triton.tiles import Plan, Problem

__all__ = ["Features", "Rows", "Traffic", "attend_traffic", "floor_of", "requests_of",
           "write_traffic"]  # fmt: skip

_FLOAT, _INDEX, _SLOT = 4, 4, 8  # bytes of float32, of block ids, of slots


class Rows(NamedTuple):
    """The query rows of a request in this step, and its keys with them."""

    queries: int
    keys: int


class Features(NamedTuple):
    """What of the scoring changes the traffic."""

    window: int | None = None
    causal: bool = True


PLAIN = Features()
"""Causal attention to all earlier keys."""


@dataclass(frozen=True)
class Traffic:
    """Bytes by tensor; those of ``parts`` are the partial results of splits.

    Attributes:
        read, written: bytes by the name of the tensor.
        flops: of the tiles that are computed, including masked pairs.
    """

    read: dict[str, int]
    written: dict[str, int]
    flops: int = 0

    @property
    def total(self) -> int:
        """Bytes read and written."""
        return sum(self.read.values()) + sum(self.written.values())


def requests_of(call: PagedCall) -> list[Rows]:
    """Returns the rows of each request of a call; reads its tensors."""
    starts = call.query_start_loc.tolist()
    lengths = call.seq_lens.tolist()
    return [
        Rows(end - begin, keys)
        for begin, end, keys in zip(starts[:-1], starts[1:], lengths, strict=True)
    ]


def attend_traffic(
    problem: Problem, plan: Plan, requests: Sequence[Rows], features: Features = PLAIN
) -> Traffic:
    """Returns the bytes of attention with the merge of its splits, in whatever launch it runs.

    Args:
        requests: of the step; their queries may be fewer than the problem's tokens (padding).
    """
    tile, splits = plan.tile, plan.splits
    tile_heads = min(problem.group, tile.rows)
    queries = tile.rows // tile_heads
    head_tiles = problem.kv_heads * -(-problem.group // tile_heads)
    heads = problem.kv_heads * problem.group
    own = sum(request.queries for request in requests)
    cells = pages = pairs = 0
    for begin, end, length in _key_ranges(problem, queries, requests, features):
        begin = begin // tile.keys * tile.keys
        tiles = -(-(end - begin) // tile.keys)
        pairs += tiles * tile.keys * tile.rows
        cells += _distinct_cells(begin, tiles * tile.keys, length, tile.keys, problem.page)
        pages += _pages(begin, tiles, length, tile.keys, problem.page)
    element, stored, scale = _sizes(problem)
    out = problem.tokens * heads * problem.value_dim * element
    read = {
        "query": own * heads * problem.key_dim * element * splits,
        "key_cache": cells * head_tiles * problem.key_dim * stored,
        "value_cache": cells * head_tiles * problem.value_dim * stored,
        "key_scale": cells * head_tiles * scale,
        "value_scale": cells * head_tiles * scale,
        "block_table": pages * head_tiles * _INDEX,
        "parts": 0,
    }
    written = {"out": out, "lse": problem.tokens * heads * _FLOAT, "parts": 0}
    if splits > 1:
        written["parts"] = own * heads * splits * (problem.value_dim + 2) * _FLOAT
        read["parts"] = written["parts"]
    return Traffic(read, written, _flops(problem, pairs * head_tiles, rows=1))


def write_traffic(problem: Problem, written_tokens: int | None = None) -> Traffic:
    """Returns the bytes of writing new keys and values; None: every token has a slot."""
    tokens = problem.tokens if written_tokens is None else written_tokens
    element, stored, scale = _sizes(problem)
    rows = tokens * problem.kv_heads
    key, value = rows * problem.key_dim, rows * problem.value_dim
    return Traffic(
        {"key": key * element, "value": value * element, "slots": problem.tokens * _SLOT},
        {
            "key_cache": key * stored,
            "value_cache": value * stored,
            "key_scale": rows * scale,
            "value_scale": rows * scale,
        },
    )


def floor_of(problem: Problem, requests: Sequence[Rows], features: Features = PLAIN) -> Traffic:
    """Returns the bytes and operations that any kernel needs for these requests."""
    element, stored, scale = _sizes(problem)
    heads, cells, pairs, pages = problem.kv_heads * problem.group, 0, 0, 0
    for request in requests:
        ranges = [*_visible(request, problem.keys, features)]
        if not any(end > begin for begin, end in ranges):
            continue
        begin, end = min(b for b, _ in ranges), max(e for _, e in ranges)
        cells += end - begin
        pages += -(-end // problem.page) - begin // problem.page
        pairs += sum(max(e - b, 0) for b, e in ranges)
    own = sum(request.queries for request in requests)
    cells *= problem.kv_heads
    read = {
        "query": own * heads * problem.key_dim * element,
        "key_cache": cells * problem.key_dim * stored,
        "value_cache": cells * problem.value_dim * stored,
        "key_scale": cells * scale,
        "value_scale": cells * scale,
        "block_table": pages * _INDEX,
    }
    written = {
        "out": problem.tokens * heads * problem.value_dim * element,
        "lse": problem.tokens * heads * _FLOAT,
    }
    return Traffic(read, written, _flops(problem, pairs, heads))


def _key_ranges(
    problem: Problem, queries: int, requests: Sequence[Rows], features: Features
) -> Iterator[tuple[int, int, int]]:
    """Begin and end of the keys of each tile of rows, and the request's length.

    Splits divide the tiles of keys of a tile of rows, so their number changes nothing here.
    """
    for request in requests:
        length = min(request.keys, problem.keys)
        for first in range(0, request.queries, queries):
            position = length - request.queries + first
            end, begin = length, 0
            if features.causal:
                end = min(position + queries, length)
            if features.window is not None:
                begin = max(position - features.window + 1, 0)
            if end > begin:
                yield begin, end, length


def _visible(request: Rows, limit: int, features: Features) -> Iterator[tuple[int, int]]:
    length = min(request.keys, limit)
    for row in range(request.queries):
        position = length - request.queries + row
        end = max(position + 1, 0) if features.causal else length
        begin = 0 if features.window is None else max(position - features.window + 1, 0)
        yield begin, end


def _distinct_cells(begin: int, span: int, length: int, keys: int, page: int) -> int:
    """Cells that tiles read: the last may reach past the pages, and reads those of one block."""
    missing = max(begin + span - -(-length // page) * page, 0)
    return span - missing + min(missing, page)


def _pages(begin: int, tiles: int, length: int, keys: int, page: int) -> int:
    """Entries of the block table, once a tile."""
    held = -(-length // page)
    starts = (begin + number * keys for number in range(tiles))
    return sum(min(-(-(start + keys) // page), held) - start // page for start in starts)


def _sizes(problem: Problem) -> tuple[int, int, int]:
    """Bytes of an element of queries, of caches, and of a scale."""
    element = getattr(torch, problem.dtype).itemsize
    return (element, element, 0) if problem.codes == "none" else (element, 1, _FLOAT)


def _flops(problem: Problem, pairs: int, rows: int) -> int:
    return 2 * pairs * rows * (problem.key_dim + problem.value_dim)
