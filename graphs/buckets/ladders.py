"""Common bucket ladders, as :class:`~graphs.buckets.space.BucketSpace` factories.

Each takes one keyword per axis and returns the product of the ladders. The maximum is always a
bucket, even off the stride; sizes are unique; 0 is a size like any other (no shared blocks).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index
from typing import SupportsIndex

from graphs.buckets.space import Axis, Bucket, BucketSpace

__all__ = ["explicit", "exponential", "linear", "padding_aware"]


def linear(**axes: tuple[int, int, int]) -> BucketSpace:
    """Multiples of a step, and powers of two below it.

    `linear(tokens=(1, 32, 100))` has the sizes 1 2 4 8 16 32 64 96 100.

    Args:
        axes: `name=(min, step, max)` for each axis.

    Raises:
        ValueError: no axis, `min < 0`, `step < 1` or `max < min`.
    """
    return _ladders(axes, "(min, step, max)", _linear_sizes)


def exponential(**axes: tuple[int, int, int] | tuple[int, int, int, int]) -> BucketSpace:
    """Sizes in equal ratios: `exponential(tokens=(1, 256, 9))` is 1 2 4 8 16 32 64 128 256.

    The "unified" ladder of other engines has 10 points and a multiple of 128:
    `exponential(tokens=(1, 8192, 10, 128), shared=(0, 128, 11, 128), unique=(0, 4096, 11, 128))`.

    Args:
        axes: `name=(min, max, points)` or `name=(min, max, points, multiple)` for each axis. With a
            multiple, sizes are rounded up to it, except for 0 and the maximum. Sizes that round to
            the same int are merged, so an axis may get fewer than `points`; one point is the
            maximum, and a minimum of 0 takes one point.

    Raises:
        ValueError: no axis, `min < 0`, `max < min`, `points < 1` or `multiple < 1`.
    """
    return _ladders(axes, "(min, max, points) or (min, max, points, multiple)", _exponential_sizes)


def padding_aware(**axes: tuple[int, int, int, int, int]) -> BucketSpace:
    """The fewest multiples of a step that keep padding within two limits; powers of two below.

    Sizes double up to the first above the step. From there on a multiple of the step is left out if
    padding to the next one is within the limits. `padding_aware(tokens=(16, 16, 128, 32, 25))` has
    the sizes 16 32 48 64 80 96 128. This is the rule of vLLM's Gaudi plugin (vllm-gaudi#762).

    Args:
        axes: `name=(min, step, max, absolute, percent)` for each axis: padding of at most
            `absolute` (0: no limit), and at most `percent` of the padded size. Multiples of
            `absolute` are always included. 0 percent is a linear ladder, 50 powers of two.

    Raises:
        ValueError: no axis, `min < 0`, `step < 1`, `max < min`, `absolute < 0`, or `percent`
            outside 0..50.
    """
    return _ladders(axes, "(min, step, max, absolute, percent)", _padding_aware_sizes)


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
    return BucketSpace(
        axes, ((index(each),) if isinstance(each, SupportsIndex) else each for each in sizes)
    )


def _ladders(
    axes: Mapping[str, tuple[int, ...]], form: str, sizes_of: Callable[..., set[int]]
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


def _exponential_sizes(low: int, high: int, points: int, multiple: int = 1) -> set[int]:
    _check_range(low, high)
    if points < 1 or multiple < 1:
        raise ValueError(f"points is {points} and multiple is {multiple}, at least 1 is needed")
    if points == 1:
        return {high}
    if low == 0:
        return {0, high} if high <= 1 else {0} | _exponential_sizes(1, high, points - 1, multiple)
    ratio = math.log(high / low) / (points - 1)
    # Rounded up, less what floating point adds to an exact power.
    sizes = [low, *(math.ceil(low * math.exp(ratio * i) - 1e-6) for i in range(1, points - 1))]
    return {high} | {min(high, -(-size // multiple) * multiple) for size in sizes}


def _padding_aware_sizes(low: int, step: int, high: int, absolute: int, percent: int) -> set[int]:
    _check_range(low, high)
    if step < 1 or absolute < 0 or not 0 <= percent <= 50:
        raise ValueError(
            f"step is {step}, absolute is {absolute} and percent is {percent}; step >= 1, "
            "absolute >= 0 and 0 <= percent <= 50 are needed"
        )
    limit = absolute or high
    sizes = [low]
    while sizes[-1] <= step and (sizes[-1] * 2 or 1) <= high:
        sizes.append(sizes[-1] * 2 or 1)
    for size in range(sizes[-1] + step, high + 1, step):
        padding = size + step - sizes[-1] - 1  # of the least need that would go to the next one
        too_much = padding > limit or padding > (size + step) * percent / 100
        if too_much or size % limit == 0:
            sizes.append(size)
    return {*sizes, high}


def _check_range(low: int, high: int) -> None:
    if not 0 <= low <= high:
        raise ValueError(f"min is {low} and max is {high}, 0 <= min <= max is needed")
