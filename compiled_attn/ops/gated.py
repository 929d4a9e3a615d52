"""A gate and what it is for in one call: part of the pass over inductor's graphs.

Most models multiply silu of one layer with another layer of the same input (SwiGLU, Shazeer 2020).
The op ``packed_gated`` does that while both are in the caches: written, read and written again, the
outputs of a prompt cost as much as a hundredth of its multiplications.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any, cast

import torch
from torch.fx import Graph, Node, map_arg

__all__ = ["SHAPES", "gate"]

_aten = torch.ops.aten
SHAPES = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)
"""Ops that give a tensor another shape, and no other numbers."""
_CAST = torch.ops.prims.convert_element_type.default


def gate(graph: Graph, layers: Node) -> None:
    """Replaces ``silu(layer) * other`` of a call of ``packed_linears`` by ``packed_gated``.

    Only where these are all layers of the call, of the same shape, nothing else reads what is
    multiplied, and the product has their dtype.

    Args:
        graph: is rewritten in place.
        layers: the call.
    """
    outs = [*layers.users]
    if len(outs) != 2 or any(user.target is not getitem for user in outs):
        return
    for first, second in (outs, outs[::-1]):
        shaped = _only_user(first, _is_shape)
        other = _only_user(second, _is_shape)
        product = _product(shaped or first)
        alike = (shaped and shaped.args[1:]) == (other and other.args[1:])
        if product is None or not alike or (other or second) not in product.all_input_nodes:
            continue
        if len((other or second).users) == 1 and _are_alike(first, second, product):
            _replace(graph, layers, first, shaped, product)
            return


def _are_alike(first: Node, second: Node, product: Node) -> bool:
    a, b, out = (node.meta["val"] for node in (first, second, product))
    # Sizes of outputs are numbers, those of rows may be symbols.
    return bool(a.shape[-1] == b.shape[-1] and a.dtype == b.dtype == out.dtype)


def _replace(graph: Graph, layers: Node, first: Node, shaped: Node | None, product: Node) -> None:
    input, *lists = cast(tuple[Any, ...], layers.args)
    given: tuple[Any, ...] = input, *(of if first.args[1] == 0 else of[::-1] for of in lists)
    with graph.inserting_before(layers):
        gated = graph.call_function(torch.ops.compiled_attn.packed_gated.default, given)
        gated.meta.update(first.meta)
        gated.meta["eager_input_vals"] = map_arg(given, lambda node: node.meta["val"]), {}
    with graph.inserting_before(product):
        out = gated
        if shaped is not None:
            shape = cast(Callable[..., Any], shaped.target)
            out = graph.call_function(shape, (gated, *shaped.args[1:]), shaped.kwargs)
            out.meta.update(product.meta)
    product.replace_all_uses_with(out)
    _erase(graph, product, layers)


def _erase(graph: Graph, node: Node, layers: Node) -> None:
    """Erases a node and what it was made of, back to the layers."""
    dead = [node]
    for node in dead:  # which grows
        inputs = [] if node is layers else node.all_input_nodes
        graph.erase_node(node)
        dead += [each for each in inputs if not each.users and each not in dead]


def _product(x: Node) -> Node | None:
    """The product of ``silu(x)``, as decomposed, with something."""
    wide = _only_user(x, _is_cast_to(torch.float32)) or x
    silu = _of_exponential(wide) or _of_sigmoid(wide)
    if silu is None:
        return None
    narrow = _only_user(silu, _is_cast_to(x.meta["val"].dtype)) if wide is not x else silu
    return narrow and _only_user(narrow, _is(_aten.mul.Tensor))


def _of_exponential(x: Node) -> Node | None:
    """``x / (e^-x + 1)``."""
    if len(x.users) != 2:
        return None
    negative = next((user for user in x.users if user.target is _aten.neg.default), None)
    power = negative and _only_user(negative, _is(_aten.exp.default))
    sum = power and _only_user(power, _is(_aten.add.Tensor))
    if sum is None or sum.args != (power, 1) or sum.kwargs:
        return None
    quotient = _only_user(sum, _is(_aten.div.Tensor))
    return quotient if quotient and quotient.args == (x, sum) else None


def _of_sigmoid(x: Node) -> Node | None:
    """``x * sigmoid(x)``."""
    if len(x.users) != 2:
        return None
    sigmoid = next((user for user in x.users if user.target is _aten.sigmoid.default), None)
    product = sigmoid and _only_user(sigmoid, _is(_aten.mul.Tensor))
    return product if product and {*product.args} == {x, sigmoid} else None


def _only_user(node: Node, wanted: Callable[[Node], bool]) -> Node | None:
    users = [*node.users]
    return users[0] if len(users) == 1 and wanted(users[0]) else None


def _is(target: Any) -> Callable[[Node], bool]:
    return lambda node: node.target is target


def _is_cast_to(dtype: torch.dtype) -> Callable[[Node], bool]:
    return lambda node: node.target is _CAST and node.args[1] == dtype


def _is_shape(node: Node) -> bool:
    return node.target in SHAPES
