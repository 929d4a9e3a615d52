"""Guards of the trace of one call of a region, compared and added in another."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["OtherCall", "guards_of"]

_IDENTITY = "DUPLICATE_INPUT"  # Dynamo's guard that two names are of one object
_HOOKS = "EMPTY_NN_MODULE_HOOKS_DICT"  # of a module that is called, whose hooks no source names


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
        Guards as torch keeps them, each with its source, what compares it, and with what; those of
        identity as they are.

    Raises:
        LookupError: one says nothing of other objects.
    """
    from torch._dynamo import guards as dynamo

    own = [each for each in arguments if each is not None]
    names = {part.name for each in (*own, *read) for part in _with_parts(each)}
    inside = set(own)
    found, identities = [], []
    for guard in tx.output.guards:
        source, kind = guard.originating_source, guard.create_fn_name()
        how: Any = dynamo.GUARD_VALUE_DISPATCH.get(kind)
        is_read = (source.base if kind == _HOOKS else source).name in names
        if kind == _IDENTITY:
            identities += [guard] * is_read
        elif how is dynamo.SKIP_GUARD or not is_read or inside.isdisjoint(_with_parts(source)):
            continue
        elif not hasattr(how, "eval_fn"):
            raise LookupError(f"{kind} of {source.name}")
        else:
            value = tx.output.resolve_source_value(source)
            found.append((source, how, how.get_metadata_fn(guard, value), guard))
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
            guards: torch's, each with its source, what compares, and what it is compared with.
            identities: guards that what has two names is one object.
        """
        own = [each for each in guards if self.source(each[0]) != each[0]]
        pairs = [pair for guard in identities if (pair := self._names(guard)) != _names(guard)]
        try:
            if not all(how.eval_fn(self._value(at), expected) for at, how, expected, _ in own):
                return False
            if any(self._value(one) is not self._value(other) for one, other in pairs):
                return False
        except Exception:  # there is nothing in such a place
            return False
        for source, _, _, guard in own:
            self._add(self.source(source), guard)
        self._add_identities(pairs)
        return True

    def _value(self, source: Any) -> Any:
        return self.source(source).get_value(self._scope, {}, self._values)

    def _names(self, guard: Any) -> tuple[Any, Any]:
        one, other = _names(guard)
        return self.source(one), self.source(other)

    def _add(self, source: Any, guard: Any) -> None:
        from torch._dynamo.guards import install_guard
        from torch._dynamo.variables.builder import VariableBuilder

        if guard.create_fn_name() == "TENSOR_MATCH":  # it is of what Dynamo knows as an input
            VariableBuilder(self._tx, source)(self._value(source))
        else:
            install_guard(source.make_guard(guard.create_fn))

    def _add_identities(self, pairs: list[tuple[Any, Any]]) -> None:
        from torch._dynamo.guards import GuardBuilder, install_guard

        for one, other in pairs:
            is_one = functools.partial(GuardBuilder.DUPLICATE_INPUT, source_b=other)
            install_guard(one.make_guard(is_one))


def _parts(source: Any) -> dict[str, Any]:
    """The sources that a source is made of."""
    from torch._guards import Source

    fields = ((each.name, getattr(source, each.name)) for each in dataclasses.fields(source))
    return {name: value for name, value in fields if isinstance(value, Source)}


def _with_parts(source: Any) -> Iterator[Any]:
    yield source
    for part in _parts(source).values():
        yield from _with_parts(part)


def _names(guard: Any) -> tuple[Any, Any]:
    return guard.originating_source, guard.create_fn.keywords["source_b"]
