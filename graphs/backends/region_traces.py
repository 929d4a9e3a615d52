"""Layers that are alike are traced once, and guarded each.

A region (``torch.compiler.nested_compile_region``) is compiled once for all its calls. Since torch
2.13 Dynamo also takes the trace of its first call for others: where all arguments are tensors,
modules and constants, and what the trace read of one layer is the same of the next. Here that is

- of more calls: arguments may be tuples, dictionaries and frozen dataclasses of these, if the trace
  has made them;
- of one function: torch takes those that were made by the same code for one, whatever is in their
  closures, and computes the second as the first;
- compared by all guards: torch leaves out those of modules, such as that of their class or of their
  hooks, and computes a layer with another activation as the first;
- guarded: what was compared becomes a guard of every layer, so that a later change is seen.

Where torch has no such thing, or keeps it elsewhere, each call is traced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from typing import Any

from graphs.backends.region_guards import OtherCall, guards_of, told, with_parts

__all__ = ["traced_once"]

_log = logging.getLogger(__name__)

_MOST = 8  # traces of a graph that others are compared with
_CURRENT: ContextVar[_Traces | None] = ContextVar("traces of regions", default=None)


@contextlib.contextmanager
def traced_once() -> Iterator[None]:
    """For what is compiled inside, by this thread: a region's trace serves all calls alike."""
    before = _CURRENT.set(_Traces() if _is_possible() else None)
    try:
        yield
    finally:
        _CURRENT.reset(before)


@functools.cache
def _is_possible() -> bool:
    """Whether Dynamo has such traces; its functions then ask those of the current capture."""
    try:
        from torch._dynamo.variables import invoke_subgraph

        replaced = {name: _asking(invoke_subgraph, name) for name in _REPLACED}
    except (ImportError, AttributeError) as error:
        _log.debug("every call of a region is traced: %s", error)
        return False
    for name, function in replaced.items():
        setattr(invoke_subgraph, name, function)
    return True


def _asking(module: Any, name: str) -> Callable[..., Any]:
    """A function of Dynamo's that leaves it to the traces of a capture, where there is one."""
    own = getattr(module, name)

    @functools.wraps(own)
    def asking(*args: Any) -> Any:
        traces = _CURRENT.get()
        return own(*args) if traces is None else _REPLACED[name](traces, own, *args)

    return asking


class _Unknown(Exception):
    """An argument that cannot be compared."""


class _Traces:
    """The traces of regions in one graph; its methods stand for Dynamo's, which they are given."""

    def __init__(self) -> None:
        self._guards: dict[int, tuple[list[Any], list[Any]]] = {}
        self._count = 0

    def function_of(self, own: Callable[..., Any], region: Any) -> Hashable:
        """Who can take the trace of a region: calls of the same function; None: nobody."""
        from torch._dynamo.variables.functions import UserFunctionVariable

        # A method has an object, and a module parameters, that are no arguments.
        is_function = type(region) is UserFunctionVariable
        return region.get_function() if is_function and own(region) else None

    def fingerprint(self, own: Callable[..., Any], tx: Any, args: Any, kwargs: Any) -> Any:
        """The tensors, modules and constants of a call, and how they are put together."""
        from torch._dynamo.variables.invoke_subgraph import InputFingerprint, classify_vt

        leaves: list[Any] = []
        try:
            shape = tuple(
                (name, _taken_apart(tx, value, leaves))
                for name, value in (*enumerate(args), *kwargs.items())
            )
        except _Unknown as error:
            _log.debug("a call of a region is traced: %s among its arguments", error)
            return InputFingerprint([], [], True, None)
        tagged: Any = [(classify_vt(leaf), leaf) for leaf in leaves]
        sources = [getattr(leaf, "source", None) for leaf in leaves]
        # In place of a tree of torch's, and compared like it.
        tree: Any = shape, _which_are_one(leaves)
        return InputFingerprint(tagged, sources, False, tree)

    def condition(
        self, own: Callable[..., Any], tx: Any, fingerprint: Any, sources: Any
    ) -> Any | None:
        """What must be the same of another call; None: the trace is for this one alone."""
        if self._count == _MOST:
            return None
        self._count += 1
        try:
            condition = own(tx, fingerprint, type(sources)())
            guards = guards_of(tx, fingerprint.arg_sources, sources)
        except Exception as error:  # a guard that says nothing of other objects
            _log.debug("a trace of a region serves one call: %s", error)
            return None
        if condition is not None:
            condition = dataclasses.replace(condition, guards=[], traced_sources=sources)
            self._guards[id(condition)] = guards
        return condition

    def is_reusable(
        self, own: Callable[..., Any], tx: Any, condition: Any, fingerprint: Any, entry: Any
    ) -> bool:
        """Whether a trace serves another call, which then has all guards that it gave its own."""
        from torch._dynamo.variables import invoke_subgraph

        nothing = type(condition.traced_sources)()
        arguments = dataclasses.replace(condition, traced_sources=nothing)
        if not own(tx, arguments, fingerprint, entry):
            return False
        if not _can_be_moved(entry.arg_sources, fingerprint.arg_sources):
            return False
        places = invoke_subgraph.build_source_replacement(
            entry.arg_sources, fingerprint.arg_sources
        )
        call = OtherCall(tx, places)
        read = type(nothing)(map(call.source, condition.traced_sources))
        if invoke_subgraph.has_mutated_vars(tx, read) or not _has_sizes(tx, entry):
            return False
        return call.guarded(*self._guards[id(condition)])


_REPLACED: dict[str, Callable[..., Any]] = {
    "get_fn_code": _Traces.function_of,
    "build_input_fingerprint": _Traces.fingerprint,
    "build_reuse_condition": _Traces.condition,
    "is_reusable": _Traces.is_reusable,
}


def _taken_apart(tx: Any, value: Any, leaves: list[Any]) -> Hashable:
    """Adds the leaves of an argument, and tells the rest of it."""
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.dicts import ConstDictVariable
    from torch._dynamo.variables.invoke_subgraph import classify_vt
    from torch._dynamo.variables.lists import ListVariable, TupleVariable
    from torch._dynamo.variables.user_defined import (
        FrozenDataClassVariable,
        UserDefinedTupleVariable,
    )

    value = value.realize()
    parts: dict[Hashable, Any]
    if classify_vt(value) is not None:
        leaves.append(value)
        return told(value.value) if isinstance(value, ConstantVariable) else None
    kind = value.python_type()
    if value.source is not None:  # it may be read in other ways than by its parts
        raise _Unknown(f"{kind.__name__} from outside")
    if isinstance(value, ListVariable | TupleVariable | UserDefinedTupleVariable):
        if kind.__dictoffset__ and kind is not list:
            raise _Unknown(f"{kind.__name__} with attributes")
        parts = dict(enumerate(value.items))
    elif isinstance(value, ConstDictVariable) and kind is dict:
        parts = {key.vt.as_python_constant(): each for key, each in value.items.items()}
    elif isinstance(value, FrozenDataClassVariable):
        parts = dict(tx.output.side_effects.store_attr_mutations.get(value, {}))
        if parts.keys() != {field.name for field in dataclasses.fields(kind)}:
            raise _Unknown(f"{kind.__name__} with more or less than its fields")
    else:
        raise _Unknown(kind.__name__)
    own = ((key, told(key), _taken_apart(tx, each, leaves)) for key, each in parts.items())
    return kind, tuple(own)


def _which_are_one(leaves: list[Any]) -> Hashable:
    """For each leaf the place of the first that is the same tensor, size or module."""
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    first: dict[Any, int] = {}
    places = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, UnspecializedNNModuleVariable):
            same: Any = id(leaf.value)
        else:
            same = place if leaf.is_python_constant() else leaf.as_proxy().node
        places.append(first.setdefault((type(leaf), same), place))
    return tuple(places)


def _can_be_moved(traced: list[Any], other: list[Any]) -> bool:
    """Whether each argument of a trace has one place in another call, whatever else lies in it."""
    if [each is None for each in traced] != [each is None for each in other]:
        return False
    pairs = {pair for pair in zip(traced, other, strict=True) if None not in pair}
    moved = {place for pair in pairs if pair[0] != pair[1] for place in pair}
    places = {place for pair in pairs for place in pair}
    inside = {part for place in places for part in with_parts(place) if part != place}
    is_one = len({one for one, _ in pairs}) == len({two for _, two in pairs}) == len(pairs)
    return is_one and moved.isdisjoint(inside)


def _has_sizes(tx: Any, entry: Any) -> bool:
    """Whether the sizes that a trace takes are at hand, under the names they have now.

    A symbol that was found to be another one plus one is still kept as itself.
    """
    from torch._dynamo.variables.invoke_subgraph import LiftedBoundSymbol

    bound = tx.output.current_tracer.bound_symbols
    origins = entry.subgraph_input_mapping
    for size in [each.expr for each in origins if isinstance(each, LiftedBoundSymbol)]:
        if size not in bound:
            same = (old for old in bound if tx.output.shape_env.replace(old) == size)
            if (old := next(same, None)) is None:
                return False
            bound[size] = bound[old]
    return True
