"""`bucketed`: one call from a module to captured graphs that serve inputs of any size."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from graphs.bucketed.axes import ladder_of
from graphs.bucketed.padding import Pad
from graphs.bucketed.trial import BucketedOptions
from graphs.bucketed.wrapped import Bucketed, Overflow
from graphs.buckets.learned import buckets_for
from graphs.buckets.recorded import RecordedSizes
from graphs.buckets.space import BucketSpace
from graphs.capture.capture import resolve
from graphs.capture.contract import Backend
from graphs.capture.inputs import name_of
from graphs.errors import BucketedError
from graphs.warmup.schedule import Order

__all__ = ["bucketed"]


def bucketed(
    function: Callable[..., Any],
    example: Sequence[Any] | Mapping[str, Any] | None = None,
    /,
    *,
    axes: Mapping[str, Any] | None = None,
    buckets: BucketSpace | None = None,
    pad: Mapping[str, Pad] | None = None,
    outputs: Mapping[str, Any] | None = None,
    discrete: Mapping[str, Sequence[Any]] | None = None,
    exact: Sequence[str] = (),
    overflow: Overflow = "error",
    split: str = "",
    backend: str | Backend = "inductor",
    options: Mapping[str, Any] | None = None,
    symbolic: bool | Sequence[str] | None = None,
    check: bool = True,
    learn: str | Path | None = None,
    max_graphs: int | None = None,
    order: Order = "largest_first",
    budget_seconds: float | None = None,
    budget_bytes: int | None = None,
    journal: str | Path | None = None,
    name: str = "",
    training: bool = False,
    **ranges: Any,
) -> Bucketed:
    """Wrap a callable so that inputs of any size within ranges run in graphs captured before.

        encoder = graphs.bucketed(model, batch=(1, 32), length=(16, 512))
        encoder.warmup()
        out = encoder(input_ids=ids, attention_mask=mask)  # nothing compiles

    Each call is padded to the cheapest bucket that holds it, runs there without gradients, and its
    outputs are cut back to the sizes of its inputs.

    Args:
        function: a module, function or method. Inputs and outputs may be nested (dicts, lists,
            tuples, classes registered with torch).
        example: inputs by position (a tuple or list) or keyword (a dict). The warmup runs the
            callable on copies of it at the sizes of the buckets. Default: `dummy_inputs` of the
            module (transformers) with an attention mask, else the first call before the warmup,
            which runs eagerly.
        axes: by input, the axis of each dimension: ``{"ids": ("batch", "length"), "cache": {1:
            "length"}}``, with names, ``torch.export.Dim`` or None; an entry for a container is for
            all tensors in it. Default: found by the sizes of the example; its first tensor with
            enough dimensions has the axes in their order.
        buckets: instead of ranges; its axes are the names.
        pad: by input, the value of padding, or ``"repeat"`` for the last real slice. Default: 0,
            and False for bools.
        outputs: by output (``output``, ``output['logits']``), per dimension: its axis, None (not
            cut), or a function that takes the sizes of all axes by keyword and returns the size.
            Default: found by runs at two or three sizes; a dimension that follows an axis, or is a
            multiple of it, is cut.
        discrete: by input, the values that it may take (flags, small enums). Each combination has
            graphs of its own.
        exact: axes that are not padded, since the module mixes along them (a convolution, a norm):
            only the sizes of the buckets are served.
        overflow: what to do with larger inputs: `error` raises BucketOverflow; `eager` runs the
            callable; `split` cuts them along one axis and joins the results; `compile` captures
            their exact size. The last three are counted, and logged once.
        split: axis of `overflow="split"`; default: the first.
        backend, options: a name out of :func:`graphs.available_backends` or a backend object, and
            its options.
        symbolic: whether one compile serves all sizes (of these axes), which then run unpadded;
            sizes 0 and 1 are compiled apart, and what a guard excludes is padded. Default: where
            the backend can.
        check: whether the warmup compares results through padding with those without.
        learn: a file that records the sizes of calls (counts only); the next process with it adds
            buckets where they pad least, never instead of the given ones.
        max_graphs: buckets at most, with those that were learned or captured late; default: twice
            the given ones.
        order, budget_seconds, budget_bytes, journal: see :class:`graphs.WarmupManager`.
        name: for errors; default: the callable's own name.
        training: not supported; raises BucketedError.
        ranges: one keyword per axis: ``(min, max)``, which are min, twice that and so on, and max;
            a list of sizes; a ``torch.export.Dim`` with a maximum; a one-axis BucketSpace.

    Raises:
        BucketedError: ranges, axes or options that do not fit.
        BucketFileError: `learn` is another file.
        CaptureError: the backend is unknown or does not work here.
    """
    if training:
        raise BucketedError(
            "training=True: captured graphs have no gradients; train the module itself, and wrap "
            "it in eval mode afterwards"
        )
    if overflow not in get_args(Overflow):
        raise BucketedError(f"overflow is {overflow!r}; expected one of {get_args(Overflow)}")
    space = _space(buckets, ranges)
    for axis in (*exact, *([split] if split else [])):
        if axis not in space.names:
            raise BucketedError(
                f"there is no axis {axis!r}; expected one of {', '.join(space.names)}"
            )
    recorded, ladder = None, space
    if learn is not None:
        recorded = RecordedSizes(learn, space.names)
        space = _learned(recorded, space, max_graphs)
    name = name or name_of(function)
    found = resolve(backend, name)
    if symbolic is None or symbolic is True:
        can = not found.why_no_symbolic()
        symbolic = space.names if can or symbolic else ()
    manager_options: dict[str, Any] = {
        "backend": found,
        "order": order,
        "budget_seconds": budget_seconds,
        "budget_bytes": budget_bytes,
        "journal": journal,
        "timed_runs": 0,
        "shared_runs": 1,
        "overflow": "compile" if overflow == "compile" else "error",
        "strict": overflow != "compile",
        "symbolic": tuple(symbolic or ()),
        **_fresh(found),
        **(options or {}),
    }
    given = BucketedOptions(
        name, space, ladder, axes, dict(pad or {}), dict(outputs or {}), frozenset(exact), check
    )
    settings = {each: _distinct(values) for each, values in (discrete or {}).items()}
    if empty := [each for each, values in settings.items() if not values]:
        raise BucketedError(f"discrete: '{empty[0]}' has no values; expected at least one")
    return Bucketed(
        function,
        example,
        given,
        settings,
        manager_options,
        overflow,
        split or space.names[0],
        2 * len(ladder) if max_graphs is None else max_graphs,
        recorded,
    )


def _space(buckets: BucketSpace | None, ranges: Mapping[str, Any]) -> BucketSpace:
    if (buckets is None) == (not ranges):
        raise BucketedError(
            "expected a range for each axis, such as batch=(1, 32), or buckets=BucketSpace(...), "
            f"got {'both' if ranges else 'neither'}"
        )
    if buckets is not None:
        return buckets
    return functools.reduce(operator.mul, (ladder_of(*each) for each in ranges.items()))


def _learned(recorded: RecordedSizes, space: BucketSpace, most: int | None) -> BucketSpace:
    try:
        return buckets_for(recorded.counts, space, 2 * len(space) if most is None else most)
    except ValueError as error:
        raise BucketedError(f"learn: {error}") from None


def _distinct(values: Sequence[Any]) -> tuple[Any, ...]:
    found: list[Any] = []
    for value in values:
        if not any(type(value) is type(each) and value == each for each in found):
            found.append(value)
    return (*found,)


def _fresh(backend: Backend) -> dict[str, Any]:
    # Outputs are handed out, so no later replay may overwrite them.
    return {"fresh_outputs": True} if "fresh_outputs" in (backend.options or {}) else {}
