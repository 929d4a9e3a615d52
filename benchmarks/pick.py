"""Prints what one `BucketSpace.pick` costs: `python benchmarks/pick.py`."""

from __future__ import annotations

import random
import timeit

from graphs import BucketSpace, explicit, linear


def free_space(axes: int, buckets: int, seed: int = 0) -> BucketSpace:
    """Make a free (non-product) space of about `buckets` buckets over `axes` axes."""
    rng = random.Random(seed)
    names = [f"axis{i}" for i in range(axes)]
    sizes = {tuple(rng.randint(1, 4096) for _ in names) for _ in range(buckets - 1)}
    return explicit(names, [*sorted(sizes), (4096,) * axes])


def microseconds_per_pick(space: BucketSpace, picks: int = 20_000, seed: int = 1) -> float:
    """Time one pick of a random legal need."""
    rng = random.Random(seed)
    needs = [{a.name: rng.randint(0, a.high) for a in space.axes} for _ in range(512)]

    def sweep() -> None:
        for need in needs:
            space.pick(**need)

    rounds = max(1, picks // len(needs))
    return min(timeit.repeat(sweep, number=rounds, repeat=5)) / (rounds * len(needs)) * 1e6


def main() -> None:
    """Print one line for each kind of space."""
    spaces = {
        "1 axis, linear": linear(tokens=(1, 8, 4096)),
        "3 axes, free": free_space(3, 500),
        "4 axes, free": free_space(4, 500),
        "3 axes, product": linear(a=(1, 512, 4096), b=(0, 64, 256), c=(1, 64, 128)),
        "3 axes, free, 5000": free_space(3, 5000),
    }
    for name, space in spaces.items():
        print(
            f"{name:20s} {len(space):5d} buckets  {microseconds_per_pick(space):6.2f} us per pick"
        )


if __name__ == "__main__":
    main()
