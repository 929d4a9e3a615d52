"""How outputs follow the axes: found by comparing runs at two or three sizes of each axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from graphs.errors import BucketedError

__all__ = ["Cut", "Run", "find_cuts", "shapes_of"]

Sizes: TypeAlias = "Mapping[str, int]"


class Run(NamedTuple):
    """Sizes of the inputs of an eager run, and its flat outputs."""

    sizes: Sizes
    outputs: Sequence[Any]


class Cut(NamedTuple):
    """A dimension of an output, and its size at given sizes of the axes."""

    output: int
    dim: int
    axis: str
    size_at: Callable[[Sizes], int]


def find_cuts(
    names: Sequence[str], runs: Sequence[Run], annotations: Mapping[str, Any]
) -> list[Cut]:
    """Find the dimensions of outputs that follow an axis.

    Args:
        names: of the flat outputs.
        runs: the first at some sizes, each other one with another size on one axis.
        annotations: by output, per dimension: an axis, None (is not cut), or a callable that takes
            the sizes of all axes by keyword and returns the size.

    Raises:
        BucketedError: an output follows two axes, or no multiple of one, and is not annotated; or
            an annotation names no output or axis, or disagrees with the runs.
    """
    base, *others = runs
    given = _entries(names, base, annotations)
    cuts: list[Cut] = []
    for index, name in enumerate(names):
        value = base.outputs[index]
        if not isinstance(value, Tensor):
            if any(other.outputs[index] != value for other in others):
                raise BucketedError(f"output '{name}' is a constant that changes with the sizes")
            continue
        if any(other.outputs[index].dim() != value.dim() for other in others):
            raise BucketedError(f"output '{name}' has another number of dimensions at other sizes")
        for dim in range(value.dim()):
            size = value.shape[dim]
            changing = [each for each in others if each.outputs[index].shape[dim] != size]
            axes = [*dict.fromkeys(_changed(base, other) for other in changing)]
            if (index, dim) in given:
                cut = _annotated(index, dim, given[index, dim], axes)
                if cut is not None:
                    _check_annotation(cut, name, runs)
                    cuts.append(cut)
            elif axes:
                along = [each for each in others if _changed(base, each) in axes]
                cuts.append(_multiple(index, dim, name, axes, [base, *along]))
    return cuts


def shapes_of(
    tensors: Sequence[int], runs: Sequence[Run], cuts: Sequence[Cut]
) -> list[list[int | None]]:
    """Return the shapes of outputs that are tensors, with None where a dimension changes uncut."""
    are_cut = {(cut.output, cut.dim) for cut in cuts}
    shapes: list[list[int | None]] = []
    for index in tensors:
        found = [*zip(*(run.outputs[index].shape for run in runs), strict=True)]
        shapes.append(
            [
                sizes[0] if (index, dim) in are_cut or len({*sizes}) == 1 else None
                for dim, sizes in enumerate(found)
            ]
        )
    return shapes


def _changed(base: Run, other: Run) -> str:
    return next(axis for axis, size in other.sizes.items() if size != base.sizes[axis])


def _multiple(index: int, dim: int, name: str, axes: Sequence[str], runs: Sequence[Run]) -> Cut:
    where = f"dimension {dim} of output '{name}'"
    remedy = (
        f"say how, outputs={{{name!r}: {{{dim}: ...}}}} with an axis, None, or a function of the "
        "sizes"
    )
    if len(axes) > 1:
        raise BucketedError(f"{where} follows {' and '.join(axes)}; expected one axis: {remedy}")
    (axis,) = axes
    factor, rest = divmod(runs[0].outputs[index].shape[dim], runs[0].sizes[axis])
    sizes = [(run.outputs[index].shape[dim], run.sizes[axis]) for run in runs]
    if rest or not factor or any(size != factor * of for size, of in sizes):
        shown = ", ".join(f"{size} at {axis}={of}" for size, of in sizes)
        raise BucketedError(f"{where} is {shown}, no multiple of '{axis}': {remedy}")
    return Cut(index, dim, axis, lambda at: factor * at[axis])


def _entries(
    names: Sequence[str], base: Run, annotations: Mapping[str, Any]
) -> dict[tuple[int, int], Any]:
    found: dict[tuple[int, int], Any] = {}
    for name, annotation in annotations.items():
        if name not in names:
            raise BucketedError(
                f"outputs: there is no {name!r}; expected one of {', '.join(names)}"
            )
        index = names.index(name)
        pairs = annotation.items() if isinstance(annotation, Mapping) else enumerate(annotation)
        for dim, entry in pairs:
            rank = getattr(base.outputs[index], "ndim", 0)
            if not isinstance(dim, int) or not -rank <= dim < rank:
                raise BucketedError(f"outputs: '{name}' has no dimension {dim!r}; it has {rank}")
            if isinstance(entry, str) and entry not in base.sizes:
                raise BucketedError(
                    f"outputs: dimension {dim} of '{name}' follows {entry!r}; expected one of "
                    f"{', '.join(base.sizes)}"
                )
            found[index, dim % rank] = entry
    return found


def _annotated(index: int, dim: int, entry: Any, axes: Sequence[str]) -> Cut | None:
    if entry is None:
        return None
    if isinstance(entry, str):
        return Cut(index, dim, entry, lambda sizes: sizes[entry])

    def size_at(sizes: Sizes) -> int:
        try:
            return int(entry(**sizes))
        except TypeError as error:
            raise BucketedError(
                f"outputs: the function of dimension {dim} fails: {error}; expected one that takes "
                f"{', '.join(sizes)} by keyword and returns a size"
            ) from error

    return Cut(index, dim, axes[0] if axes else "", size_at)


def _check_annotation(cut: Cut, name: str, runs: Sequence[Run]) -> None:
    for run in runs:
        expected, got = cut.size_at(run.sizes), run.outputs[cut.output].shape[cut.dim]
        if expected != got:
            shown = " ".join(f"{axis}={size}" for axis, size in run.sizes.items())
            raise BucketedError(
                f"outputs: dimension {cut.dim} of '{name}' is {got} at {shown}; expected "
                f"{expected} as annotated"
            )
