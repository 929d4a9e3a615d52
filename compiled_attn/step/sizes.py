"""The sizes that a step is padded to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["checked_sizes"]


def checked_sizes(sizes: Mapping[str, int], needed: Sequence[str]) -> dict[str, int]:
    """The sizes as a dict.

    Raises:
        ValueError: a needed one is missing, or negative.
    """
    missing = [name for name in needed if name not in sizes]
    if missing:
        raise ValueError(
            f"expected a bucket with {', '.join(needed)}, got {dict(sizes)}: add "
            f"{', '.join(missing)}, 0 where there is none"
        )
    negative = {name: sizes[name] for name in needed if sizes[name] < 0}
    if negative:
        raise ValueError(f"expected sizes of at least 0, got {negative}: a part has 0 or more")
    return dict(sizes)
