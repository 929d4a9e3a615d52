"""Buckets over named axes, and the choice of the cheapest one that holds a need.

A need is a point of non-negative ints over named axes (`tokens=37, blocks=412`); a bucket holds it
if it is at least as large on every axis. A :class:`BucketSpace` may be any set of buckets, not only
a product of ladders.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, NoReturn, TypeAlias

from graphs.errors import BucketOverflow

__all__ = ["Axis", "Bucket", "BucketSpace", "whole"]

_RESERVED = frozenset({"get", "items", "keys", "names", "of", "sizes", "values"})


@dataclass(frozen=True)
class Axis:
    """One named dimension of a need, with the range `low..high` that a legal need has on it.

    Args:
        name: a Python identifier, since needs are passed by keyword.
        low: the smallest legal value, at least 0.
        high: the largest legal value, at least `low`.

    Raises:
        ValueError: the name is not a usable identifier, or the range is empty or negative.
    """

    name: str
    low: int
    high: int

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name.startswith("_") or self.name in _RESERVED:
            raise ValueError(
                f"axis name {self.name!r} is not usable; expected an identifier that is not one of "
                f"{', '.join(sorted(_RESERVED))} and has no leading underscore"
            )
        if not 0 <= self.low <= self.high:
            raise ValueError(
                f"axis {self.name!r} has range {self.low}..{self.high}; expected 0 <= low <= high"
            )


class Bucket(Mapping[str, int]):
    """Sizes over named axes: immutable, hashable, read like a mapping or by attribute.

    `Bucket(tokens=256, shared=64)` has `bucket["tokens"] == bucket.tokens == 256` and the text
    `tokens=256 shared=64`.

    Raises:
        ValueError: there is no axis, or a size is negative.
        TypeError: a size is not a whole number.
    """

    __slots__ = ("_hash", "names", "sizes")

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    _hash: int

    def __init__(self, **sizes: int) -> None:
        if not sizes:
            raise ValueError("a bucket needs at least one axis, got none")
        checked = tuple(whole(name, size) for name, size in sizes.items())
        self._fill(tuple(sizes), checked)

    @classmethod
    def of(cls, names: tuple[str, ...], sizes: tuple[int, ...]) -> Bucket:
        """Make a bucket without checking its sizes."""
        bucket = cls.__new__(cls)
        bucket._fill(names, sizes)
        return bucket

    def _fill(self, names: tuple[str, ...], sizes: tuple[int, ...]) -> None:
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "_hash", hash((names, sizes)))

    def __getitem__(self, name: str) -> int:
        try:
            return self.sizes[self.names.index(name)]
        except ValueError:
            raise KeyError(f"no axis {name!r}; axes are {', '.join(self.names)}") from None

    def __getattr__(self, name: str) -> int:
        if name in Bucket.__slots__ or name not in self.names:
            raise AttributeError(f"bucket has no axis {name!r}")
        return self[name]

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a bucket is immutable; make a new one instead of setting {name!r}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Bucket):
            return NotImplemented
        return self.sizes == other.sizes and self.names == other.names

    def __reduce__(self) -> tuple[Any, ...]:
        return Bucket.of, (self.names, self.sizes)

    def __str__(self) -> str:
        return " ".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True))

    def __repr__(self) -> str:
        return f"Bucket({', '.join(str(self).split())})"


def whole(name: str, size: int) -> int:
    """Return `size` as an int; raise TypeError if it is not whole, ValueError if negative."""
    try:
        whole = index(size)
    except TypeError:
        raise TypeError(f"{name}={size!r} is not a whole number; sizes are ints") from None
    if whole < 0:
        raise ValueError(f"{name}={whole} is negative; sizes are at least 0")
    return whole


Cost: TypeAlias = "Callable[[Bucket], float]"

_MAX_CELLS = 2_000_000


class BucketSpace:
    """An ordered set of buckets over named axes, and a cost to choose between those that fit.

    Args:
        axes: :class:`Axis` objects, or names (range `0..largest bucket`).
        buckets: buckets, mappings, or tuples of sizes in the order of the axes. Duplicates are
            dropped.
        cost: of running a bucket, in any unit. Default: the product of its sizes, each at least 1.

    Raises:
        ValueError: no axis, no bucket, a repeated axis, a size outside its axis, a cost that is not
            finite.
        TypeError: a size is not a whole number.
    """

    def __init__(
        self,
        axes: Sequence[Axis | str],
        buckets: Iterable[Bucket | Mapping[str, int] | Sequence[int]],
        cost: Cost | None = None,
    ) -> None:
        names = tuple(axis if isinstance(axis, str) else axis.name for axis in axes)
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a space needs at least one axis, each once; got {list(names)}")
        self.names = names
        self._buckets = tuple(dict.fromkeys(_as_bucket(names, item) for item in buckets))
        if not self._buckets:
            raise ValueError("a space needs at least one bucket, got none")
        self.axes = tuple(self._ranged(axis) for axis in axes)
        self._cost = cost
        self._costs = {bucket: _finite_cost(cost or _product, bucket) for bucket in self._buckets}
        self._by_cost = tuple(sorted(self._buckets, key=lambda b: (self._costs[b], b.sizes)))
        self._index = _CheapestDominating([bucket.sizes for bucket in self._by_cost])

    def pick(self, **need: int) -> Bucket:
        """Return the cheapest bucket that holds `need`: `space.pick(tokens=37, blocks=412)`.

        Raises:
            BucketOverflow: no bucket holds the need.
            ValueError: an axis is missing or unknown, or a value is negative.
            TypeError: a value is not a whole number.
        """
        try:
            point = [index(need[name]) for name in self.names]
        except (KeyError, TypeError):
            self._refuse(need)
        if len(need) != len(point) or min(point) < 0:
            self._refuse(need)
        rank = self._index.rank(point)
        if rank < 0:
            raise BucketOverflow(need, self.largest)
        return self._by_cost[rank]

    def cost(self, bucket: Bucket) -> float:
        """Return the cost of a bucket, which need not be a member."""
        known = self._costs.get(bucket)
        return known if known is not None else _finite_cost(self._cost or _product, bucket)

    @property
    def largest(self) -> Bucket:
        """The most expensive bucket."""
        return self._by_cost[-1]

    def with_cost(self, cost: Cost) -> BucketSpace:
        """Return the same buckets, picked by `cost(bucket)`, which should grow with every axis."""
        return BucketSpace(self.axes, self._buckets, cost)

    def with_buckets(
        self, more: Iterable[Bucket | Mapping[str, int] | Sequence[int]]
    ) -> BucketSpace:
        """Return the space with more buckets, and the same axes and cost."""
        return BucketSpace(self.axes, [*self._buckets, *more], self._cost)

    def where(self, legal: Callable[[Bucket], bool]) -> BucketSpace:
        """Drop the buckets that no legal need can reach.

        `legal(need)` takes a need as a :class:`Bucket`: `space.where(lambda n: n.logits <=
        n.tokens)`. A bucket stays if one of the needs that it serves is legal, tried at the low,
        middle and high end of each axis; that is exact unless two conditions pull the same axis in
        opposite directions. The maximum stays if it is legal.

        Raises:
            ValueError: nothing is legal, or the space has more than two million cells (apply
                `where` to the parts).
        """
        reached: dict[Bucket, None] = {}
        for cell in self._cells():
            rank = self._index.rank([high for _, high in cell])
            bucket = self._by_cost[rank]
            if rank < 0 or bucket in reached:
                continue
            if any(legal(Bucket.of(self.names, point)) for point in _spread(cell)):
                reached[bucket] = None
        reachable = [bucket for bucket in self._buckets if bucket in reached]
        if not reachable:
            raise ValueError(
                "where() leaves no bucket: no legal need was found; check the predicate"
            )
        return BucketSpace(self.axes, reachable, self._cost)

    def _cells(self) -> Iterator[tuple[tuple[int, int], ...]]:
        # All needs in one cell of the grid of sizes go to the same bucket.
        columns = [_intervals(axis, {b[axis.name] for b in self._buckets}) for axis in self.axes]
        if math.prod(map(len, columns)) > _MAX_CELLS:
            raise ValueError(
                f"where() would visit more than {_MAX_CELLS} cells; apply it to parts of the space"
            )
        return itertools.product(*columns)

    def __mul__(self, other: BucketSpace) -> BucketSpace:
        """Every bucket of one space with every bucket of another, over disjoint axes."""
        shared = set(self.names) & set(other.names)
        if shared:
            raise ValueError(
                f"a product needs disjoint axes, both have {', '.join(sorted(shared))}"
            )
        if self._cost is not None or other._cost is not None:
            raise ValueError("combine spaces first, then give the result a cost using with_cost()")
        pairs = (a.sizes + b.sizes for a in self for b in other)
        return BucketSpace(self.axes + other.axes, pairs)

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)

    def __len__(self) -> int:
        return len(self._buckets)

    def __contains__(self, bucket: object) -> bool:
        return bucket in self._costs

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BucketSpace):
            return NotImplemented
        return (self.axes, self._buckets, self._cost) == (other.axes, other._buckets, other._cost)

    def __hash__(self) -> int:
        return hash((self.axes, self._buckets))

    def __repr__(self) -> str:
        axes = ", ".join(f"{a.name}={a.low}..{a.high}" for a in self.axes)
        return f"BucketSpace({axes}; {len(self)} buckets)"

    def _ranged(self, axis: Axis | str) -> Axis:
        name = axis if isinstance(axis, str) else axis.name
        largest = max(bucket[name] for bucket in self._buckets)
        if isinstance(axis, str):
            return Axis(axis, 0, largest)
        if largest > axis.high:
            raise ValueError(f"bucket size {name}={largest} is above the axis's {axis.high}")
        return axis

    def _refuse(self, need: Mapping[str, int]) -> NoReturn:
        missing = [name for name in self.names if name not in need]
        unknown = [name for name in need if name not in self.names]
        if missing or unknown:
            wrong = [f"{name} is missing" for name in missing]
            wrong += [f"{name} is unknown" for name in unknown]
            raise ValueError(f"{', '.join(wrong)}; a need gives exactly {', '.join(self.names)}")
        for name, value in need.items():
            whole(name, value)
        raise ValueError(f"not a need: {dict(need)}")


def _as_bucket(names: tuple[str, ...], item: Bucket | Mapping[str, int] | Sequence[int]) -> Bucket:
    if isinstance(item, Mapping):
        if set(item) != set(names):
            raise ValueError(f"bucket has axes {', '.join(item)}; expected {', '.join(names)}")
        item = [item[name] for name in names]
    if len(item) != len(names):
        raise ValueError(f"bucket {tuple(item)} has {len(item)} sizes; expected {', '.join(names)}")
    return Bucket.of(names, tuple(whole(n, s) for n, s in zip(names, item, strict=True)))


def _product(bucket: Bucket) -> float:
    return math.prod(size or 1 for size in bucket.sizes)


def _finite_cost(cost: Cost, bucket: Bucket) -> float:
    value = cost(bucket)
    if not math.isfinite(value):
        raise ValueError(f"the cost of bucket {bucket} is {value}; expected a finite number")
    return value


def _intervals(axis: Axis, sizes: set[int]) -> list[tuple[int, int]]:
    edges = sorted(sizes)
    lows = [min(axis.low, edges[0]), *(edge + 1 for edge in edges[:-1])]
    return list(zip(lows, edges, strict=True))


def _spread(cell: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*({high, low, (low + high) // 2} for low, high in cell))


class _CheapestDominating:
    """Finds the first point, in the given order, that is at least a query on every axis.

    Each axis has its distinct sizes in order, and for each size the bit set of points that are at
    least as large: bit r for the point of rank r. A query ANDs one set per axis; the lowest bit is
    the answer. On a single axis the lowest bits are precomputed, so a query is one binary search.
    """

    def __init__(self, points: Sequence[tuple[int, ...]]) -> None:
        axes = range(len(points[0]))
        self._columns = [_column([point[axis] for point in points]) for axis in axes]
        self._only: list[int] | None = None
        if len(self._columns) == 1:
            self._only = [_lowest_bit(bits) for bits in self._columns[0][1]]

    def rank(self, query: Sequence[int]) -> int:
        """Return the rank of the first point that dominates `query`, or -1."""
        if self._only is not None:
            return self._only[bisect_left(self._columns[0][0], query[0])]
        bits = -1
        for (sizes, sets), value in zip(self._columns, query, strict=True):
            bits &= sets[bisect_left(sizes, value)]
        return _lowest_bit(bits)


def _column(values: list[int]) -> tuple[list[int], list[int]]:
    sizes = sorted(set(values))
    by_size: dict[int, int] = dict.fromkeys(sizes, 0)
    for rank, value in enumerate(values):
        by_size[value] |= 1 << rank
    sets = [0]  # nothing is larger than the largest
    for size in reversed(sizes):
        sets.append(sets[-1] | by_size[size])
    return sizes, sets[::-1]


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
