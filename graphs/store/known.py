"""Looks at the files of a callable once in a process, before it is captured for the first time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from graphs.capture.inputs import Input
from graphs.store.factors import code_factors, graph_factors

__all__ = ["UNTOLD", "KnownCode"]

UNTOLD = "an option is an object without a uuid(), so nobody can tell what it does: give it one"


class KnownCode:
    """:func:`graph_factors` with a memory.

    A capture imports modules and so changes which files can be reached: what counts is what a
    process finds before its first one, captured or loaded.
    """

    def __init__(self) -> None:
        self._known: MutableMapping[Any, dict[str, Any]] = WeakKeyDictionary()  # of one backend

    def factors(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Input],
        *,
        backend: str,
        options: Mapping[str, Any] | None,
    ) -> dict[str, Any] | None:
        """As :func:`graph_factors`."""
        try:
            code = self._known.get(function)
            if code is None:
                code = self._known[function] = code_factors(function, backend)
        except TypeError:  # it has no hash, or cannot be referred to weakly
            code = code_factors(function, backend)
        return graph_factors(function, inputs, backend=backend, options=options or {}, code=code)
