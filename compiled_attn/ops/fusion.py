"""A pass over inductor's graphs: fuses QKV and gate-up layers, and SwiGLU.

The op ``packed_linears`` computes several layers of one input in one call, so that memory streams
on from one weight to the next, with the same bits. ``packed_swiglu`` also computes silu(gate) * up
while both are in the caches: writing and reading them costs up to a hundredth of a prefill. Each
weight remains its own parameter.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, cast

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node, map_arg

from compiled_attn.ops.schema import SOURCES

__all__ = ["FuseLinears"]

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)
_CAST = torch.ops.prims.convert_element_type.default


class FuseLinears(CustomGraphPass):
    """Replaces ``packed_linear`` calls of one input by ``packed_linears`` or ``packed_swiglu``.

    The same for ``quantised_linear``. Requires that weights, biases and scales are inputs of the
    graph, that weights have one dtype, and that all or none of the calls have a bias.
    """

    def __call__(self, graph: Graph) -> None:
        """Rewrites the graph in place."""
        groups = defaultdict(list)
        for node in graph.nodes:
            if node.target in _kinds():
                input, parameters, settings = _arguments(node)
                if all(each is None or each.op == "placeholder" for each in parameters):
                    has = tuple(each is None for each in parameters)
                    dtype = getattr(parameters[0].meta.get("val"), "dtype", None)
                    key = _view_key(input), node.target, dtype, has, *settings
                    groups[key].append(node)
        for nodes in groups.values():
            if len(nodes) > 1:
                _fuse_swiglu(graph, _fuse(graph, nodes))

    def uuid(self) -> Any:
        """Returns the key of the pass in inductor's cache: a hash of its source and the schemas.

        Inductor does not know the schemas of ops, which cached code calls.
        """
        return get_hash_for_files((__file__, str(SOURCES / "schema.h")))


@dataclass(frozen=True)
class _Kind:
    """A layer's op, and those of several.

    Attributes:
        names: the op's arguments after the input.
        settings: how many of the last ones are no tensors.
    """

    names: Sequence[str]
    settings: int
    all: Any
    swiglu: Any


@functools.cache
def _kinds() -> Mapping[Any, _Kind]:
    ops = torch.ops.compiled_attn
    quantised = ("codes", "scales", "steps", "bias", "int8_inputs")
    return {
        ops.packed_linear.default: _Kind(
            ("weight", "bias"), 0, ops.packed_linears.default, ops.packed_swiglu.default
        ),
        ops.quantised_linear.default: _Kind(
            quantised, 1, ops.quantised_linears.default, ops.quantised_swiglu.default
        ),
    }


def _arguments(node: Node) -> tuple[Any, list[Any], list[Any]]:
    """The input, the other tensors (or None), and the settings of a call."""
    kind = _kinds()[node.target]
    given = dict(zip(("input", *kind.names), node.args, strict=False)) | node.kwargs
    others = [given.get(name) for name in kind.names]
    at = len(others) - kind.settings
    return given["input"], others[:at], [bool(each) for each in others[at:]]


def _view_key(node: Any) -> Any:
    """Equal for equal views of one tensor: each layer flattens its input by itself."""
    if isinstance(node, Node) and node.target in _VIEWS:
        base, shape = node.args[0], cast(Sequence[Any], node.args[1])
        return node.target, _view_key(base), tuple(shape)
    return node


def _fuse(graph: Graph, nodes: list[Node]) -> Node:
    """Replaces nodes with one input by a call for all layers in place of the first."""
    first, *_ = nodes
    input, _, settings = _arguments(first)
    parameters = zip(*(_arguments(node)[1] for node in nodes), strict=True)
    lists = [[each for each in of if each is not None] for of in parameters]
    given = input, *lists, *settings
    with graph.inserting_before(first):
        fused = graph.call_function(_kinds()[first.target].all, given)
        fused.meta["val"] = [node.meta["val"] for node in nodes]
        # Without it, inductor may choose any layout for the input, even columns.
        fused.meta["eager_input_vals"] = map_arg(given, lambda node: node.meta["val"]), {}
        for index, node in enumerate(nodes):
            out = graph.call_function(getitem, (fused, index))
            out.meta.update(node.meta)
            out.meta.pop("eager_input_vals", None)  # belongs to the call
            node.replace_all_uses_with(out)
    for node in nodes:
        graph.erase_node(node)
    return fused


def _fuse_swiglu(graph: Graph, layers: Node) -> None:
    """Replaces ``silu(gate) * up`` of a call for two layers by one op.

    Requires that these are all layers of the call, that they and the product have one shape and
    dtype, and that nothing else reads them.
    """
    outs = [*layers.users]
    if len(outs) != 2 or any(user.target is not getitem for user in outs):
        return
    for gate, up in (outs, outs[::-1]):
        gate_view, up_view = (_only_user(each, lambda n: n.target in _VIEWS) for each in (gate, up))
        product = _silu_product(gate_view or gate)
        same_view = (gate_view and gate_view.args[1:]) == (up_view and up_view.args[1:])
        if product is None or not same_view or (up_view or up) not in product.all_input_nodes:
            continue
        if len((up_view or up).users) == 1 and _have_same_shape(gate, up, product):
            _replace(graph, layers, gate, gate_view, product)
            return


def _have_same_shape(gate: Node, up: Node, product: Node) -> bool:
    a, b, out = (node.meta["val"] for node in (gate, up, product))
    # Numbers of outputs are ints, numbers of rows may be symbols.
    return bool(a.shape[-1] == b.shape[-1] and a.dtype == b.dtype == out.dtype)


def _replace(graph: Graph, layers: Node, gate: Node, view: Node | None, product: Node) -> None:
    input, *others = cast(tuple[Any, ...], layers.args)
    is_first = gate.args[1] == 0
    given: tuple[Any, ...] = (
        input,
        *(of if is_first or isinstance(of, bool) else of[::-1] for of in others),
    )
    op = next(kind.swiglu for kind in _kinds().values() if kind.all is layers.target)
    with graph.inserting_before(layers):
        out = swiglu = graph.call_function(op, given)
        swiglu.meta.update(gate.meta)
        swiglu.meta["eager_input_vals"] = map_arg(given, lambda node: node.meta["val"]), {}
    with graph.inserting_before(product):
        if view is not None:
            shape = cast(Callable[..., Any], view.target)
            out = graph.call_function(shape, (swiglu, *view.args[1:]), view.kwargs)
            out.meta.update(product.meta)
    product.replace_all_uses_with(out)
    dead = [product]
    for node in dead:  # grows
        inputs = [] if node is layers else node.all_input_nodes
        graph.erase_node(node)
        dead += [each for each in inputs if not each.users and each not in dead]


def _silu_product(x: Node) -> Node | None:
    """The product of silu(x), as decomposed, and another tensor."""
    wide = _only_user(x, _is_cast_to(torch.float32)) or x
    silu = _silu_by_exp(wide) or _silu_by_sigmoid(wide)
    if silu is None:
        return None
    narrow = _only_user(silu, _is_cast_to(x.meta["val"].dtype)) if wide is not x else silu
    return narrow and _only_user(narrow, _is(_aten.mul.Tensor))


def _silu_by_exp(x: Node) -> Node | None:
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


def _silu_by_sigmoid(x: Node) -> Node | None:
    """``x * sigmoid(x)``."""
    if len(x.users) != 2:
        return None
    sigmoid = next((user for user in x.users if user.target is _aten.sigmoid.default), None)
    product = sigmoid and _only_user(sigmoid, _is(_aten.mul.Tensor))
    return product if product and {*product.args} == {x, sigmoid} else None


def _only_user(node: Node, condition: Callable[[Node], bool]) -> Node | None:
    users = [*node.users]
    return users[0] if len(users) == 1 and condition(users[0]) else None


def _is(target: Any) -> Callable[[Node], bool]:
    return lambda node: node.target is target


def _is_cast_to(dtype: torch.dtype) -> Callable[[Node], bool]:
    return lambda node: node.target is _CAST and node.args[1] == dtype
