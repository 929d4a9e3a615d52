"""The backend of ``torch.compile(model, backend="bucketed", dynamic=True, options={...})``."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import SymInt, Tensor, nn
from torch.fx import GraphModule

from graphs.bucketed.axes import ladder_of
from graphs.bucketed.bucketed import bucketed
from graphs.bucketed.wrapped import Bucketed
from graphs.errors import BucketedError
from graphs.torch_internals.placeholders import traced_inputs

__all__ = ["bucketed_backend"]

_log = logging.getLogger(__name__)
_NOT_RANGES = {
    name
    for name, parameter in inspect.signature(bucketed).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}


def bucketed_backend(
    graph: GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Run a graph that Dynamo traced with symbolic sizes in buckets; its first call warms up.

    Args:
        graph: of Dynamo, with sizes left open: ``dynamic=True`` or ``mark_dynamic``.
        example_inputs: as Dynamo passes them.
        options: ranges by axis, and other keywords of :func:`graphs.bucketed`; `inner` is the
            backend that captures. The axes are the leading dimensions of the first input that has
            as many.

    Raises:
        BucketedError: there is no range.
    """
    given = dict(options or {})
    ranges = {name: given.pop(name) for name in [*given] if name not in {*_NOT_RANGES, "inner"}}
    if not ranges:
        raise BucketedError(
            "backend 'bucketed': expected a range for each axis, got none: "
            "torch.compile(model, backend='bucketed', dynamic=True, options={'batch': (1, 32)})"
        )
    if "inner" in given:
        given["backend"] = given.pop("inner")
    traced = traced_inputs(graph, example_inputs)
    symbols = _symbols(traced, ranges)
    by_symbol: dict[str, list[str]] = {}
    for name, symbol in symbols.items():
        if symbol is not None:
            by_symbol.setdefault(symbol, []).append(name)
    # Sizes that were equal at the trace are one symbol, and this graph runs while they are equal.
    open_sizes = [
        min(same, key=lambda name: ladder_of(name, ranges[name]).largest[name])
        for same in by_symbol.values()
    ]
    if not open_sizes:
        _log.warning(
            "backend 'bucketed': a graph has no symbolic size and is compiled as it is; expected "
            "dynamic=True or mark_dynamic"
        )
        return torch.compile(graph, fullgraph=True, dynamic=False)
    axes = {
        f"tensors[{index}]": {
            dim: name
            for dim, size in enumerate(_sizes(value))
            for name in open_sizes
            if _symbol(size) == symbols[name]
        }
        for index, value in enumerate(each for each in traced if isinstance(each, Tensor))
    }
    return _LateWarmup(
        _TensorsOnly(graph, traced),
        {name: ranges[name] for name in open_sizes},
        {key: dims for key, dims in axes.items() if dims},
        given,
    )


def _symbols(inputs: Sequence[Any], names: Mapping[str, Any]) -> dict[str, str | None]:
    """The symbol of each axis, None where Dynamo fixed its size."""
    tensors = [each for each in inputs if isinstance(each, Tensor)]
    # Parameters are inputs too, of fixed sizes.
    is_open = [any(isinstance(size, SymInt) for size in _sizes(each)) for each in tensors]
    candidates = [each for each, can in zip(tensors, is_open, strict=True) if can]
    if not candidates:
        return dict.fromkeys(names)
    first = next((each for each in candidates if each.dim() >= len(names)), None)
    if first is None:
        raise BucketedError(
            f"backend 'bucketed': no input has the {len(names)} dimensions {', '.join(names)}"
        )
    sizes = _sizes(first)[: len(names)]
    return {name: _symbol(size) for name, size in zip(names, sizes, strict=True)}


def _symbol(size: Any) -> str | None:
    return str(size) if isinstance(size, SymInt) else None


def _sizes(tensor: Tensor) -> Sequence[Any]:
    """Sizes, which are symbols in a trace."""
    return tensor.shape


class _TensorsOnly(nn.Module):
    """A Dynamo graph without its inputs of sizes, which are taken from the tensors."""

    def __init__(self, graph: GraphModule, example_inputs: Sequence[Any]) -> None:
        super().__init__()
        self.graph = graph
        self.tensors = [i for i, each in enumerate(example_inputs) if isinstance(each, Tensor)]
        dims: dict[str, tuple[int, int]] = {}
        for position, index in enumerate(self.tensors):
            for dim, size in enumerate(example_inputs[index].shape):
                dims.setdefault(str(size), (position, dim))
        self.sources: list[tuple[int, int] | int] = []
        seen = 0
        for index, each in enumerate(example_inputs):
            if index in self.tensors:
                self.sources.append(seen)
                seen += 1
            elif isinstance(each, SymInt) and str(each) in dims:
                self.sources.append(dims[str(each)])
            else:
                raise BucketedError(
                    f"backend 'bucketed': input {index} is {each!r}, an int or a stride that is no "
                    "size of a tensor: call .contiguous() on inputs, and set torch._dynamo.config."
                    "specialize_int for ints that are arguments"
                )

    def forward(self, *tensors: Tensor) -> Any:
        """Return what the graph returns."""
        return self.graph(
            *(
                tensors[source] if isinstance(source, int) else tensors[source[0]].shape[source[1]]
                for source in self.sources
            )
        )


class _LateWarmup:
    """Warms up at the first call, which has real inputs."""

    def __init__(
        self,
        function: _TensorsOnly,
        ranges: Mapping[str, Any],
        axes: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        self._function = function
        self._keywords: dict[str, Any] = {"axes": axes, **options, **ranges}
        self._bucketed: Bucketed | None = None

    def __call__(self, *inputs: Any) -> Any:
        tensors = [inputs[index] for index in self._function.tensors]
        if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
            raise BucketedError(
                "backend 'bucketed' has no gradients: call what it compiled under torch.no_grad()"
            )
        # Dynamo guards on the class and on marks of dimensions; captures have plain tensors.
        tensors = [each.detach() for each in tensors]
        if self._bucketed is None:
            wrapped = bucketed(self._function, tensors, **self._keywords)
            wrapped.warmup()
            self._bucketed = wrapped
        return self._bucketed(*tensors)
