"""Regions: a function that a graph calls often is traced and compiled once for all equal calls.

Built on `torch.compiler.nested_compile_region`. Its `reuse_hash_fn`, since torch 2.12, lets Dynamo
reuse the trace of an earlier call and skip the guards of later ones. So the caller's key must cover
everything that the trace depends on, apart from the arguments of the call.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphs.torch_internals.features import Feature, Patch, SharedPatch

__all__ = ["REGIONS", "REGION_REUSE", "Packed", "Region", "refuse_effects"]

_NO_LIMIT = 1 << 20  # traces of one region in a graph
_VALUES = (bool, int, float, str)


def _probe() -> str:
    region: Any = torch.compiler.nested_compile_region(lambda value: value)
    if region(_NO_LIMIT) == _NO_LIMIT:
        return ""
    return "torch.compiler.nested_compile_region changes what a function returns"


def _probe_reuse() -> str:
    parameters = inspect.signature(torch.compiler.nested_compile_region).parameters
    if missing := {"max_reuse_entries", "reuse_hash_fn"} - {*parameters}:
        return f"torch.compiler.nested_compile_region takes no {', '.join(sorted(missing))}"
    if _mark_reusable(lambda value: value)(_NO_LIMIT) != _NO_LIMIT:
        return "torch.compiler.nested_compile_region changes what a function returns"
    from torch._dynamo.variables import invoke_subgraph

    known = inspect.signature(invoke_subgraph.is_reuse_eligible).parameters
    if missing := {"tracing_info", "has_reuse_hash_fn"} - {*known}:
        return f"is_reuse_eligible takes no {', '.join(sorted(missing))}"
    from torch.fx.experimental import symbolic_shapes

    has_test = hasattr(symbolic_shapes, "has_static_value")
    return "" if has_test else "torch.fx.experimental.symbolic_shapes has no has_static_value"


def refuse_effects() -> AbstractContextManager[object]:
    """Fail captures inside that would reuse a trace which writes to Python objects.

    Torch does not check that if there is a `reuse_hash_fn`, and loses the writes of later calls.
    """
    return _PATCH if REGION_REUSE.is_on else nullcontext()


def _replacements() -> list[Patch]:
    from torch._dynamo.variables import invoke_subgraph

    own = invoke_subgraph.is_reuse_eligible
    signature = inspect.signature(own)

    @functools.wraps(own)
    def is_reuse_eligible(*args: Any, **kwargs: Any) -> bool:
        info = signature.bind(*args, **kwargs).arguments["tracing_info"]
        return info.side_effect_stack is None and own(*args, **kwargs)

    return [Patch(invoke_subgraph, "is_reuse_eligible", is_reuse_eligible)]


_PATCH = SharedPatch(lambda: _replacements())


def _mark_reusable(
    function: Callable[..., Any], hash_of: Callable[..., int] | None = None
) -> Callable[..., Any]:
    mark: Any = torch.compiler.nested_compile_region
    region: Callable[..., Any]
    region = mark(function, max_reuse_entries=_NO_LIMIT, reuse_hash_fn=hash_of or _hash)
    return region


def _suspend() -> None:
    for function in _reusable:
        _mark_reusable(function, _hash_of_module)  # replaces the marks of the function


def _resume() -> None:
    for function in _reusable:
        _mark_reusable(function)


_reusable: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()
REGIONS = Feature(
    "regions",
    gain="Compiles equal layers once; `region_reuse` needs it.",
    fallback="Every layer is compiled.",
    versions="2.11 to 2.15",
    files=(),
    probe=_probe,
)
REGION_REUSE = Feature(
    "region_reuse",
    gain="Traces equal layers once: the trace of 30 layers takes half as long.",
    fallback="Every layer is traced; equal ones are still compiled once.",
    versions="2.12 to 2.15",
    files=("graphs/torch_internals/regions.py", "invoke_subgraph.py"),
    probe=_probe_reuse,
    suspend=_suspend,
    resume=_resume,
)


class Packed(NamedTuple):
    """An argument of many calls, flattened once: its `structure`, and tensors and constants."""

    structure: str
    leaves: tuple[Any, ...]


class Region:
    """A function of a module that a graph compiles once for all equal calls.

    Args:
        function: called as ``function(module, *args, **kwargs)``. Calls with a key return a tensor
            or a tuple of tensors.
        classes: named tuples and frozen dataclasses that may be among the arguments.
    """

    def __init__(self, function: Callable[..., Any], classes: Sequence[type] = ()) -> None:
        self.function = function
        self._fields = tuple((each, _field_names(each)) for each in classes)

        def each(_: object, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return function(module, *args, **kwargs)

        def run(key: int, structure: str, module: nn.Module, *leaves: Any) -> Any:
            args, kwargs = self._rebuild(iter(structure.split(" ")), iter(leaves))
            return function(module, *args, **kwargs)

        self._region: Callable[..., Any] = each
        self._reusable: Callable[..., Any] | None = None
        if REGIONS.is_on:
            self._region = torch.compiler.nested_compile_region(each)
            if REGION_REUSE.is_on:
                # Not at the top: it imports sympy. Nor where Dynamo would trace the import.
                from torch.fx.experimental.symbolic_shapes import has_static_value

                self._has_static_value = has_static_value
                self._reusable = _mark_reusable(run)
                _reusable.add(run)

    def __call__(self, key: int | None, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call the function.

        Args:
            key: equal for two calls in a graph if they can share a trace: their modules are equal
                but for the values of parameters and buffers, none of which is an argument. None:
                the call is traced.
        """
        leaves: list[Any] = []
        if key is not None and self._reusable is not None:
            structure = self._describe((args, kwargs), leaves, [])
            if structure is not None:
                return self._reusable(key, structure, module, *leaves)
        return self._region(_never_compared, module, *args, **kwargs)

    def pack(self, value: Any) -> Any:
        """Flatten an argument into `Packed`; unchanged if it has parts that no key can describe.

        Its tensors must not be among other arguments of the call.
        """
        if self._reusable is None:
            return value
        leaves: list[Any] = []
        structure = self._describe(value, leaves, [])
        return value if structure is None else Packed(structure, tuple(leaves))

    # Dynamo traces the methods below; each line costs a millisecond in a model of many layers.

    def _describe(self, value: Any, leaves: list[Any], tensors: list[Tensor]) -> str | None:
        """Append the leaves of an argument and return its structure; None: unsupported parts.

        Dynamo assumes that tensors which are identical in the first call are so in all calls, so
        the structure says which are.
        """
        if isinstance(value, Tensor):
            # A symbolic size is not read, which would fix it.
            same = [place for place, other in enumerate(tensors) if other is value]
            leaves.append(value)
            tensors.append(value)
            layout = "contiguous" if value.is_contiguous() else "strided"
            sizes = [str(n) if self._has_static_value(n) else "any" for n in value.shape]
            return f"tensor:{','.join(sizes)}:{value.dtype}:{layout}:{same}".replace(" ", "")
        if value is None:
            return "none"
        kind = type(value)
        if kind is Packed:
            leaves.extend(value.leaves)
            return value.structure  # type: ignore[no-any-return]
        if kind in _VALUES:
            leaves.append(value)
            return f"value:{kind.__name__}:{_word(value)}"
        if kind is tuple or kind is list:
            return self._joined(f"{kind.__name__}:{len(value)}", value, leaves, tensors)
        if kind is dict:
            leaves.extend(value)
            keys = ":".join([f"{type(key).__name__}-{_word(key)}" for key in value])
            return self._joined(f"dict:{len(value)}:{keys}", value.values(), leaves, tensors)
        for place, (known, names) in enumerate(self._fields):
            if kind is known:
                parts = [getattr(value, name) for name in names]
                return self._joined(f"class:{place}", parts, leaves, tensors)
        return None

    def _joined(
        self, head: str, values: Any, leaves: list[Any], tensors: list[Tensor]
    ) -> str | None:
        parts = [head]
        for value in values:
            part = self._describe(value, leaves, tensors)
            if part is None:
                return None
            parts.append(part)
        return " ".join(parts)

    def _rebuild(self, structure: Iterator[str], leaves: Iterator[Any]) -> Any:
        kind, *details = next(structure).split(":")
        if kind == "none":
            return None
        if kind in ("tensor", "value"):
            return next(leaves)
        count = int(details[0])
        if kind == "class":
            made, names = self._fields[count]
            return made(*[self._rebuild(structure, leaves) for _ in names])
        if kind == "dict":
            keys = [next(leaves) for _ in range(count)]
            return {key: self._rebuild(structure, leaves) for key in keys}
        values = [self._rebuild(structure, leaves) for _ in range(count)]
        return values if kind == "list" else tuple(values)


def _word(value: Any) -> str:
    """Escape the separators of a structure in a constant.

    Not its `hash`, which Dynamo of torch 2.12 does not trace for every constant.
    """
    return str(value).replace("_", "__").replace(" ", "_s").replace(":", "_c")


# Not `hash`, which Dynamo of torch 2.12 does not trace, and which may collide.
def _hash(key: int, structure: str, module: nn.Module, *leaves: Any) -> int:
    return int.from_bytes(f"{key} {structure}".encode(), "little")


def _hash_of_module(key: int, structure: str, module: nn.Module, *leaves: Any) -> int:
    return int.from_bytes(f"{id(module)} {structure}".encode(), "little")


def _never_compared() -> None:
    """An argument that Dynamo cannot compare, so that it traces the call.

    Since 2.12 torch reuses traces by itself if arguments are tensors, modules or, since 2.15, other
    objects. It misses some dependencies of the trace, such as the class of a sub-module.
    """


def _field_names(kind: type) -> tuple[str, ...]:
    if dataclasses.is_dataclass(kind):
        return tuple(each.name for each in dataclasses.fields(kind))
    return tuple(kind._fields)  # type: ignore[attr-defined]
