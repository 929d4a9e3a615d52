"""Guards of the trace of one call of a region, compared and added in another."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

__all__ = ["OtherCall", "guards_of", "told", "with_parts"]

_IDENTITY = "DUPLICATE_INPUT"  # Dynamo's guard that two names are of one object


def guards_of(
    tx: Any, arguments: Iterable[Any], read: Iterable[Any]
) -> tuple[list[Any], list[Any]]:
    """The guards of what a trace has found in its arguments, and those that two names are one.

    Torch looks for guards under the sources that the trace of a region has read. Those of a module,
    such as that of its class, are under other objects of the same name, so here names are compared.

    Args:
        tx: the trace.
        arguments: sources of the arguments of the call; None: an argument has none.
        read: sources that the trace of the call has read.

    Returns:
        Guards, each with its source, what compares it, with what, and the value itself; those of
        identity as they are.

    Raises:
        LookupError: one says nothing of other objects.
    """
    from torch._dynamo import guards as dynamo

    own = [each for each in arguments if each is not None]
    names = {part.name for each in (*own, *read) for part in with_parts(each)}
    inside = set(own)
    found, identities = [], []
    for guard in tx.output.guards:
        source, kind = guard.originating_source, guard.create_fn_name()
        how: Any = dynamo.GUARD_VALUE_DISPATCH.get(kind)
        # What was read before the call is not looked up again, so all that lies in an argument
        # counts; but not how the call came about, through a forward that may know of its number.
        is_found = any(getattr(part, "member", "") == "forward" for part in with_parts(source))
        is_read = source.name in names or not is_found
        if kind == _IDENTITY:
            identities += [guard] * is_read
        elif how is dynamo.SKIP_GUARD or not is_read or inside.isdisjoint(with_parts(source)):
            continue
        elif not hasattr(how, "eval_fn"):
            raise LookupError(f"{kind} of {source.name}")
        else:
            value = tx.output.resolve_source_value(source)
            found.append(((source, how, how.get_metadata_fn(guard, value), guard), value))
    return found, identities


class OtherCall:
    """A call that is to have what the trace of another one found.

    Args:
        tx: what traces it.
        places: where its arguments come from, for where those of the traced call do.
    """

    def __init__(self, tx: Any, places: dict[Any, Any]) -> None:
        self._tx = tx
        self._places = places
        self._moved: dict[Any, Any] = {}
        self._scope = {"G": tx.output.root_tx.f_globals, "L": tx.output.root_tx.f_locals}
        self._values: dict[Any, Any] = {}

    def source(self, source: Any) -> Any:
        """Where it has what the trace found at `source`.

        As ``source.clone(places)`` of torch, but each part of many sources is moved once.
        """
        if (moved := self._moved.get(source)) is None:
            parts = _parts(source).items()
            other = {name: new for name, old in parts if (new := self.source(old)) is not old}
            moved = dataclasses.replace(source, **other) if other else source
            moved = self._moved[source] = self._places.get(moved, moved)
        return moved

    def guarded(self, guards: list[Any], identities: list[Any]) -> bool:
        """Adds the guards of the trace for this call; False: one does not hold, and none is added.

        Args:
            guards, identities: see `guards_of`.
        """
        own = [each for each in guards if self.source(each[0][0]) != each[0][0]]
        pairs = [pair for guard in identities if (pair := self._names(guard)) != _names(guard)]
        try:
            for (at, how, expected, _), before in own:
                value = self._value(at)
                if not how.eval_fn(value, expected) or told(value) != told(before):
                    return False
            if any(self._at(one) is not self._at(other) for one, other in pairs):
                return False
        except Exception:  # there is nothing in such a place
            return False
        for (source, _, _, guard), _ in own:
            self._add(source, guard)
        self._add_identities(pairs)
        return True

    def _value(self, source: Any) -> Any:
        return self._at(self.source(source))

    def _at(self, source: Any) -> Any:
        return source.get_value(self._scope, {}, self._values)

    def _names(self, guard: Any) -> tuple[Any, Any]:
        one, other = _names(guard)
        return self.source(one), self.source(other)

    def _add(self, source: Any, guard: Any) -> None:
        from torch._dynamo.guards import install_guard
        from torch._dynamo.variables.builder import VariableBuilder

        here = self.source(source)
        if guard.create_fn_name() == "TENSOR_MATCH":  # it is of what Dynamo knows as an input
            VariableBuilder(self._tx, here)(self._value(source))
        else:
            install_guard(here.make_guard(guard.create_fn))

    def _add_identities(self, pairs: list[tuple[Any, Any]]) -> None:
        from torch._dynamo.guards import GuardBuilder, install_guard

        for one, other in pairs:
            is_one = functools.partial(GuardBuilder.DUPLICATE_INPUT, source_b=other)
            install_guard(one.make_guard(is_one))


def told(value: Any) -> Hashable:
    """What a constant is beside equal to others: 1, 1.0 and True are three, 0.0 and -0.0 two."""
    if isinstance(value, tuple | list):
        return type(value), tuple(map(told, value))
    is_number = isinstance(value, bool | int | float | complex)
    return type(value) if is_number else None, repr(value) if is_number else None


def with_parts(source: Any) -> Iterator[Any]:
    """A source, and all that it is made of."""
    yield source
    for part in _parts(source).values():
        yield from with_parts(part)


def _parts(source: Any) -> dict[str, Any]:
    """The sources that a source is made of."""
    from torch._guards import Source

    fields = ((each.name, getattr(source, each.name)) for each in dataclasses.fields(source))
    return {name: value for name, value in fields if isinstance(value, Source)}


def _names(guard: Any) -> tuple[Any, Any]:
    return guard.originating_source, guard.create_fn.keywords["source_b"]
