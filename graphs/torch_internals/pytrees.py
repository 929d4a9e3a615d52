"""Containers that torch can look into (pytrees): its own, and those that others registered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.utils import _pytree

__all__ = ["Container", "container_of"]


class Container(NamedTuple):
    """One level of a container.

    Attributes:
        children: its values, in the order of `paths`.
        paths: of each child, as Python writes it after the container: ``['key']``, ``[0]``,
            ``.field``.
        rebuild: makes a container of the same kind from other children.
        is_like: whether a value of the same class has the same metadata: what it is rebuilt with
            besides its children.
    """

    children: Sequence[Any]
    paths: Sequence[str]
    rebuild: Callable[[Sequence[Any]], Any]
    is_like: Callable[[Any], bool]


def container_of(value: Any) -> Container | None:
    """Return the children of a container; None for a tensor, a constant, or an unknown class.

    Raises:
        TypeError: a key of a mapping is neither a string nor an int.
    """
    known = _pytree.SUPPORTED_NODES.get(_pytree._get_node_type(value))
    if known is None:
        return None
    children, context = known.flatten_fn(value)

    def rebuild(others: Sequence[Any]) -> Any:
        return known.unflatten_fn(others, context)

    def is_like(other: Any) -> bool:
        return bool(known.flatten_fn(other)[1] == context)

    if known.flatten_with_keys_fn is None:
        paths = [f"[{i}]" for i in range(len(children))]
    else:
        paths = [_path(key) for key, _ in known.flatten_with_keys_fn(value)[0]]
    return Container(children, paths, rebuild, is_like)


def _path(entry: Any) -> str:
    key = getattr(entry, "key", "")
    if not isinstance(key, (str, int)):
        raise TypeError(f"key {key!r} is a {type(key).__name__}; expected str or int keys")
    return str(entry)
