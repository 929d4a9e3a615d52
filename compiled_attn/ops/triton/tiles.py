"""The sizes of tiles and the number of splits: chosen by the sizes of a bucket alone."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

__all__ = ["Chip", "Plan", "Problem", "Tile", "key_blocks", "other_splits", "other_tiles", "plan"]

_MOST_SPLITS = 32
_TILES_A_SPLIT = 4
_FEW_ROWS = 2  # of a request on average: decodes and drafts


class Chip(NamedTuple):
    """What plans depend on of a device.

    Attributes:
        processors: how many multiprocessors it has.
        is_hopper: whether it is of sm_90, whose programs may have 227 KB of shared memory, and
            whose tiles were measured.
    """

    processors: int
    is_hopper: bool


class Tile(NamedTuple):
    """Query rows and keys that a program takes at once, its warps, and its stages of loads."""

    rows: int
    keys: int
    warps: int
    stages: int


class Plan(NamedTuple):
    """A tile, and the number of splits that the keys of each request are cut into.

    ``varlen``: `compiled_attn.ops.varlen` is faster, where it serves the call.
    """

    tile: Tile
    splits: int
    varlen: bool = False


class Problem(NamedTuple):
    """The sizes of a bucket that tiles depend on; numbers in its tensors are none of them.

    Attributes:
        tokens, requests: T and R.
        kv_heads, group: KV heads, and query heads of each.
        key_dim, value_dim: head sizes of keys and of values.
        keys: the longest request that the block table has room for.
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
        """All sizes in words, under which a measured plan is kept in a file; see `named`."""
        return ", ".join(f"{name} {value}" for name, value in self._asdict().items())

    @classmethod
    def named(cls, name: str) -> Problem:
        """The problem of a name.

        Raises:
            ValueError: it names none.
        """
        told = dict(each.split(" ", 1) for each in name.split(", "))
        if [*told] != [*cls._fields]:
            raise ValueError(f"expected the sizes {', '.join(cls._fields)}, got {name!r}")
        *sizes, dtype, codes = told.values()
        tokens, requests, kv_heads, group, key_dim, value_dim, keys, page = map(int, sizes)
        return cls(tokens, requests, kv_heads, group, key_dim, value_dim, keys, page, dtype, codes)

    @property
    def has_few_rows(self) -> bool:
        """Whether a request has few query rows on average."""
        return self.tokens <= _FEW_ROWS * max(self.requests, 1)


_Tiles: TypeAlias = dict[tuple[int, int], tuple[Tile, Tile]]

# Tiles by the size of an element (1: codes, under queries of 2 bytes) and of a head, for few rows a
# request (of groups that fit their rows; larger ones have those of many) and for many. All but the
# one for heads of 1024 in float32 fit the 99 KB of shared memory of sm_89 and sm_120; some spill a
# few bytes of registers (tests/compiled_attn/ops/triton/test_resources.py).
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

_OF_HOPPER: _Tiles = {
    (1, 64): (Tile(16, 128, 4, 2), Tile(128, 128, 4, 2)),
    (1, 128): (Tile(16, 128, 4, 3), Tile(128, 128, 8, 2)),
    (1, 256): (Tile(16, 64, 4, 2), Tile(128, 64, 8, 2)),
    (1, 576): (Tile(16, 64, 8, 2), Tile(64, 64, 8, 1)),
    (2, 64): (Tile(16, 64, 4, 2), Tile(128, 128, 4, 2)),
    (2, 128): (Tile(16, 128, 4, 2), Tile(128, 128, 8, 2)),
    (2, 256): (Tile(16, 64, 4, 2), Tile(128, 64, 8, 2)),
    (2, 576): (Tile(16, 64, 8, 2), Tile(64, 32, 8, 2)),
    (4, 64): (Tile(16, 128, 4, 2), Tile(64, 64, 8, 2)),
    (4, 128): (Tile(16, 64, 4, 2), Tile(32, 64, 8, 1)),
}
"""The fastest of some on an H100, also with spilled registers; other sizes have the tiles of all.

What they are beside those: benchmarks/results/gpu_tiles.txt.
"""


def plan(problem: Problem, chip: Chip) -> Plan:
    """The plan of a problem that nothing was measured of."""
    tile = _usual(problem, chip)
    return Plan(tile, _splits(problem, tile, chip.processors))


def other_tiles(problem: Problem, chip: Chip) -> list[Plan]:
    """Plans with other tiles than the usual one, to be measured beside it."""
    usual = _usual(problem, chip)
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
    """Plans with half and with twice as many splits."""
    counts = {max(1, plan.splits // 2), min(_MOST_SPLITS, 2 * plan.splits)} - {plan.splits}
    return [plan._replace(splits=count) for count in sorted(counts)]


def key_blocks(dim: int) -> tuple[int, int]:
    """Two powers of two that hold a head, or one and 0 where one alone is as small."""
    whole = max(16, _power(dim))
    rest = max(16, _power(dim - whole // 2))
    return (whole // 2, rest) if whole // 2 + rest < whole else (whole, 0)


def _usual(problem: Problem, chip: Chip) -> Tile:
    largest = max(problem.key_dim, problem.value_dim)
    element = 4 if problem.dtype == "float32" else 2 if problem.codes == "none" else 1
    few, many = _tiles_of(element, largest, _OF_HOPPER if chip.is_hopper else {})
    if not problem.has_few_rows:
        return many
    if problem.group <= few.rows:
        return few
    return many._replace(rows=min(many.rows, _power(problem.group)))


def _tiles_of(element: int, size: int, first: _Tiles) -> tuple[Tile, Tile]:
    """Those of the smallest size that holds one, of the first table if that has any."""
    for table in (first, _TILES):
        sizes = [each for own, each in table if own == element and each >= size]
        if sizes:
            return table[element, min(sizes)]
    return _TILES[element, 1024]


def _splits(problem: Problem, tile: Tile, processors: int) -> int:
    """Enough programs for two on each multiprocessor, while each has some tiles of keys."""
    heads = min(problem.group, tile.rows)
    queries = tile.rows // heads
    tiles = problem.tokens // queries + max(problem.requests, 1)
    programs = tiles * problem.kv_heads * -(-problem.group // heads)
    room = problem.keys // (tile.keys * _TILES_A_SPLIT)
    return max(1, min(_floor_power(2 * processors // programs), _floor_power(room), _MOST_SPLITS))


def _power(size: int) -> int:
    """The smallest power of two of at least a size."""
    return 1 << max(size - 1, 0).bit_length()


def _floor_power(size: int) -> int:
    """The largest power of two of at most a size; 0 of 0."""
    return 1 << size.bit_length() - 1 if size else 0
