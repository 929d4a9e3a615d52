"""Chooses tiles and splits from the sizes of a bucket."""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

__all__ = ["Chip", "Plan", "Problem", "Tile", "key_blocks", "other_splits", "other_tiles", "plan"]

_MAX_SPLITS = 64
_TILES_PER_SPLIT = 2
_FEW_ROWS = 2  # per request on average: decodes and drafts


class Chip(NamedTuple):
    """Properties of a device that plans depend on.

    Attributes:
        processors: number of multiprocessors.
        is_hopper: sm_90, with 227 KB of shared memory and measured tiles.
    """

    processors: int
    is_hopper: bool


class Tile(NamedTuple):
    """Query rows and keys of a program's tile, its warps, and its pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


class Plan(NamedTuple):
    """A tile, and the number of splits of each request's keys.

    ``kernel``: "triton", or the provider that is faster for the calls it can serve
    (`compiled_attn.ops.providers`).
    """

    tile: Tile
    splits: int
    kernel: str = "triton"


class Problem(NamedTuple):
    """The sizes of a bucket that tiles depend on.

    Attributes:
        tokens, requests: T and R.
        kv_heads, group: KV heads, and query heads of each.
        key_dim, value_dim: head sizes of keys and of values.
        keys: longest request that fits the block table.
        page: tokens of a block.
        dtype: of the query, such as "bfloat16".
        codes: of the cache: "none", "int8", "e4m3", "e5m2".
    """

    tokens: int
    requests: int
    kv_heads: int
    group: int
    key_dim: int
    value_dim: int
    keys: int
    page: int
    dtype: str
    codes: str

    @property
    def name(self) -> str:
        """The sizes as text, the key of measured plans in files; see `named`."""
        return ", ".join(f"{name} {value}" for name, value in self._asdict().items())

    @classmethod
    def named(cls, name: str) -> Problem:
        """Parses a name.

        Raises:
            ValueError: not a name of a problem.
        """
        sizes_by_name = dict(each.split(" ", 1) for each in name.split(", "))
        if [*sizes_by_name] != [*cls._fields]:
            raise ValueError(f"expected the sizes {', '.join(cls._fields)}, got {name!r}")
        *sizes, dtype, codes = sizes_by_name.values()
        tokens, requests, kv_heads, group, key_dim, value_dim, keys, page = map(int, sizes)
        return cls(tokens, requests, kv_heads, group, key_dim, value_dim, keys, page, dtype, codes)

    @property
    def has_few_rows(self) -> bool:
        """Whether a request has few query rows on average."""
        return self.tokens <= _FEW_ROWS * max(self.requests, 1)

    @property
    def element(self) -> int:
        """Bytes of an element of the caches, 4 for float32 whatever the codes."""
        return 4 if self.dtype == "float32" else 2 if self.codes == "none" else 1


_Tiles: TypeAlias = dict[tuple[int, int], tuple[Tile, Tile]]

# Tiles by element size (1: codes, with queries of 2 bytes) and head size, for few rows per request
# (if the group fits the tile's rows, else for many) and for many rows. All but heads of 1024 in
# float32 fit the 99 KB of shared memory of sm_89 and sm_120; some spill a few bytes of registers
# (tests/compiled_attn/ops/triton/test_resources.py).
_TILES: _Tiles = {
    (1, 64): (Tile(16, 32, 4, 3), Tile(64, 32, 8, 2)),
    (1, 128): (Tile(16, 64, 8, 2), Tile(64, 32, 8, 2)),
    (1, 256): (Tile(16, 16, 4, 3), Tile(16, 16, 4, 2)),
    (1, 576): (Tile(16, 16, 16, 2), Tile(16, 16, 16, 2)),
    (1, 1024): (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    (2, 64): (Tile(16, 64, 4, 2), Tile(128, 64, 8, 2)),
    (2, 128): (Tile(16, 64, 8, 2), Tile(64, 32, 4, 2)),
    (2, 256): (Tile(16, 16, 4, 2), Tile(32, 16, 8, 2)),
    (2, 576): (Tile(16, 16, 8, 2), Tile(16, 16, 8, 2)),
    (2, 1024): (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    (4, 64): (Tile(16, 32, 8, 2), Tile(32, 32, 8, 1)),
    (4, 128): (Tile(16, 16, 4, 2), Tile(16, 16, 4, 2)),
    (4, 256): (Tile(16, 16, 8, 2), Tile(16, 16, 8, 2)),
    (4, 1024): (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}

_HOPPER_TILES: _Tiles = {
    (1, 64): (Tile(16, 128, 4, 2), Tile(128, 128, 4, 2)),
    (1, 128): (Tile(16, 128, 4, 2), Tile(128, 128, 8, 2)),
    (1, 256): (Tile(16, 64, 4, 2), Tile(128, 64, 8, 2)),
    (1, 576): (Tile(16, 64, 8, 2), Tile(64, 64, 8, 1)),
    (2, 64): (Tile(16, 64, 4, 2), Tile(128, 128, 4, 2)),
    (2, 128): (Tile(16, 128, 4, 2), Tile(128, 128, 8, 2)),
    (2, 256): (Tile(16, 64, 4, 2), Tile(128, 64, 8, 2)),
    (2, 576): (Tile(16, 64, 8, 2), Tile(64, 32, 8, 2)),
    (4, 64): (Tile(16, 128, 4, 2), Tile(64, 64, 8, 2)),
    (4, 128): (Tile(16, 64, 4, 2), Tile(32, 64, 8, 1)),
}
"""The fastest on an H100, even if they spill registers (benchmarks/results/gpu_tiles.txt); other
sizes use `_TILES`. Decodes of 8-bit heads of 128 were measured with three stages, which now spill
(48 bytes for e4m3, 0 with two) and load no more keys at once; warmups try them too."""


def plan(problem: Problem, chip: Chip) -> Plan:
    """Returns the default plan of a problem."""
    tile = _default_tile(problem, chip)
    return Plan(tile, _splits(problem, tile, chip.processors))


def other_tiles(problem: Problem, chip: Chip) -> list[Plan]:
    """Returns plans with other tiles than the default, to be measured."""
    usual = _default_tile(problem, chip)
    rows = usual.rows // 2 if usual.rows > 16 else 16 if problem.has_few_rows else 32
    changed = [
        usual._replace(keys=2 * usual.keys),
        usual._replace(keys=max(16, usual.keys // 2)),
        usual._replace(rows=rows),
        usual._replace(warps=usual.warps // 2 if usual.warps > 4 else 8),
        usual._replace(stages=usual.stages + 1),
    ]
    others = [tile for tile in dict.fromkeys(changed) if tile != usual]
    return [Plan(tile, _splits(problem, tile, chip.processors)) for tile in others]


def other_splits(plan: Plan) -> list[Plan]:
    """Returns plans with half and with twice as many splits."""
    counts = {max(1, plan.splits // 2), min(_MAX_SPLITS, 2 * plan.splits)} - {plan.splits}
    return [plan._replace(splits=count) for count in sorted(counts)]


def key_blocks(dim: int) -> tuple[int, int]:
    """Returns two powers of two that hold a head, or one and 0 if one alone is as small."""
    whole = max(16, _ceil_power(dim))
    rest = max(16, _ceil_power(dim - whole // 2))
    return (whole // 2, rest) if whole // 2 + rest < whole else (whole, 0)


def _default_tile(problem: Problem, chip: Chip) -> Tile:
    largest = max(problem.key_dim, problem.value_dim)
    few, many = _tiles_of(problem.element, largest, _HOPPER_TILES if chip.is_hopper else {})
    if not problem.has_few_rows:
        return many
    if problem.group <= few.rows:
        return few
    return many._replace(rows=min(many.rows, _ceil_power(problem.group)))


def _tiles_of(element: int, size: int, first: _Tiles) -> tuple[Tile, Tile]:
    for table in (first, _TILES):
        sizes = [each for own, each in table if own == element and each >= size]
        if sizes:
            return table[element, min(sizes)]
    return _TILES[element, 1024]


def _splits(problem: Problem, tile: Tile, processors: int) -> int:
    """Two programs per multiprocessor, unless they would have too few keys.

    The last program of a tile merges all its splits alone: their number times the bytes of a part
    should not exceed the bytes of keys and values that each program reads.
    """
    requests, heads = max(problem.requests, 1), min(problem.group, tile.rows)
    queries, own = tile.rows // heads, -(-problem.tokens // requests)
    tiles = problem.tokens // queries + requests
    if problem.has_few_rows:  # nearly all of them have one tile
        tiles = requests * -(-own // queries)
    programs = tiles * problem.kv_heads * -(-problem.group // heads)
    read = problem.keys * (problem.key_dim + problem.value_dim) * problem.element
    part = 4 * problem.value_dim * heads * max(1, min(queries, own))
    limits = (
        2 * processors // max(programs, 1),
        problem.keys // (tile.keys * _TILES_PER_SPLIT),
        math.isqrt(read // part),
        _MAX_SPLITS,
    )
    return max(1, _floor_power(min(limits)))


def _ceil_power(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _floor_power(size: int) -> int:
    return 1 << size.bit_length() - 1 if size else 0
