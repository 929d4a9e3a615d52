"""Points over named axes: the axis with its legal range, and the bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import index
from typing import Any, NoReturn

__all__ = ["Axis", "Bucket", "whole"]

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
