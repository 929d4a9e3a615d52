"""The ladders that the field uses, as :class:`~graphs.buckets.BucketSpace` factories.

Each takes one keyword per axis and returns the product of the ladders. The maximum itself is always
a bucket, even off the stride; nothing is there twice; 0 is a size like any other (no shared
blocks).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index
from typing import SupportsIndex

from graphs.bucket_file import BucketFileError, from_file, to_file
from graphs.buckets import Axis, Bucket, BucketSpace

__all__ = ["BucketFileError", "explicit", "exponential", "from_file", "linear", "to_file"]


def linear(**axes: tuple[int, int, int]) -> BucketSpace:
    """Multiples of a step, and powers of two below it.

    `linear(tokens=(1, 32, 100))` has the sizes 1 2 4 8 16 32 64 96 100.

    Args:
        axes: `name=(min, step, max)` for each axis.

    Raises:
        ValueError: no axis, `min < 0`, `step < 1` or `max < min`.
    """
    return _ladders(axes, "(min, step, max)", _linear_sizes)


def exponential(**axes: tuple[int, int, int]) -> BucketSpace:
    """Sizes in equal ratios: `exponential(tokens=(1, 256, 9))` is 1 2 4 8 16 32 64 128 256.

    Args:
        axes: `name=(min, max, points)` for each axis. Small sizes that round to the same int are
            there once, so an axis may get fewer than `points`; one point is the maximum alone, and
            a minimum of 0 takes one point.

    Raises:
        ValueError: no axis, `min < 0`, `max < min` or `points < 1`.
    """
    return _ladders(axes, "(min, max, points)", _exponential_sizes)


def explicit(
    axes: Sequence[Axis | str],
    sizes: Iterable[Bucket | Mapping[str, int] | Sequence[int] | SupportsIndex],
) -> BucketSpace:
    """Exactly the given buckets: `explicit(["tokens", "shared"], [(1, 0), (64, 8)])`.

    Args:
        axes: names, or axes with their legal range.
        sizes: one tuple, mapping or bucket for each bucket; on a single axis an int will do.

    Raises:
        ValueError: no axis, no bucket, a wrong number of sizes, or a negative one.
    """
    return BucketSpace(axes, map(_as_sizes, sizes))


def _as_sizes(
    item: Bucket | Mapping[str, int] | Sequence[int] | SupportsIndex,
) -> Mapping[str, int] | Sequence[int]:
    return (index(item),) if isinstance(item, SupportsIndex) else item


def _ladders(
    axes: Mapping[str, tuple[int, int, int]],
    form: str,
    sizes_of: Callable[[int, int, int], set[int]],
) -> BucketSpace:
    if not axes:
        raise ValueError(f"no axis given; expected one keyword per axis, name={form}")
    columns = []
    for name, parameters in axes.items():
        try:
            columns.append(sorted(sizes_of(*parameters)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}={parameters}: expected {form}: {error}") from None
    ranges = [Axis(name, 0, column[-1]) for name, column in zip(axes, columns, strict=True)]
    return BucketSpace(ranges, itertools.product(*columns))


def _linear_sizes(low: int, step: int, high: int) -> set[int]:
    _check_range(low, high)
    if step < 1:
        raise ValueError(f"step is {step}, at least 1 is needed")
    powers = (1 << bit for bit in range(step.bit_length()))
    multiples = range(step, high + 1, step)
    ladder = {size for size in powers if size < step} | set(multiples)
    return {size for size in ladder if low < size < high} | {low, high}


def _exponential_sizes(low: int, high: int, points: int) -> set[int]:
    _check_range(low, high)
    if points < 1:
        raise ValueError(f"points is {points}, at least 1 is needed")
    if points == 1:
        return {high}
    if low == 0:
        return {0, high} if high <= 1 else {0} | _exponential_sizes(1, high, points - 1)
    ratio = math.log(high / low) / (points - 1)
    # Rounded up, less what floating point adds to an exact power.
    return {low, high} | {math.ceil(low * math.exp(ratio * i) - 1e-6) for i in range(1, points - 1)}


def _check_range(low: int, high: int) -> None:
    if not 0 <= low <= high:
        raise ValueError(f"min is {low} and max is {high}, 0 <= min <= max is needed")
