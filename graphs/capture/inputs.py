"""Inputs of a captured graph: descriptions, and fast checks that later ones match; its callable."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from graphs.torch_internals.checks import native_tensor_check

__all__ = [
    "DistinctInputs",
    "Input",
    "InputSpec",
    "InputsCheck",
    "NotInputs",
    "byte_range",
    "check_inputs",
    "has_memory",
    "memory_shared_by",
    "name_of",
    "overlaps",
    "parameter_names",
    "parameters_of",
    "ranges_overlap",
    "tensors_of",
    "variants_of",
    "with_own_code",
]

Input: TypeAlias = Tensor | bool | int | float | str | None


class NotInputs(TypeError):
    """The inputs are not a tuple, list or mapping."""


def check_inputs(inputs: object, source: str) -> None:
    """Raise NotInputs unless `inputs`, which come from `source`, are a tuple, list or mapping."""
    if isinstance(inputs, (tuple, list, Mapping)):
        return
    remedy = "pass them in the order of the callable's parameters, or by their names"
    if isinstance(inputs, Tensor):
        remedy = "a single input is written (x,)"
    raise NotInputs(
        f"{source}: expected a tuple, list or dict of inputs, got a {type(inputs).__name__}: "
        f"{remedy}"
    )


@dataclass(frozen=True)
class InputSpec:
    """One input of a captured graph: the layout of a tensor, or the value of a constant.

    Attributes:
        name: the parameter's name in the captured callable.
        shape, dtype, device, stride: of a tensor; None for a constant.
        constant: the value of an input that is not a tensor.
    """

    name: str
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    stride: tuple[int, ...] | None = None
    constant: bool | int | float | str | None = None

    @classmethod
    def of(cls, name: str, value: Input) -> InputSpec:
        """Describe one example input.

        Raises:
            TypeError: it is neither a tensor nor a plain constant.
        """
        if isinstance(value, Tensor):
            return cls(name, tuple(value.shape), value.dtype, value.device, value.stride())
        if value is None or isinstance(value, (bool, int, float, str)):
            return cls(name, constant=value)
        raise TypeError(
            f"input '{name}' is a {type(value).__name__}; expected a tensor, None, bool, int, "
            "float or str: pass the tensors inside it one by one"
        )

    def mismatch(self, value: object) -> str | None:
        """Describe how `value` differs from what was captured, or None."""
        if self.shape is None:
            return self._constant_mismatch(value)
        if not isinstance(value, Tensor):
            return f"tensor '{self.name}' is a {type(value).__name__}, captured a tensor"
        got = (tuple(value.shape), value.dtype, value.device, value.stride())
        kinds = ("shape", "dtype", "device", "stride")
        captured = (self.shape, self.dtype, self.device, self.stride)
        for kind, now, then in zip(kinds, got, captured, strict=True):
            if now != then:
                return f"tensor '{self.name}' has {kind} {_short(now)}, captured {_short(then)}"
        return None

    def _constant_mismatch(self, value: object) -> str | None:
        if type(value) is type(self.constant) and value == self.constant:
            return None
        shown = "a tensor" if isinstance(value, Tensor) else repr(value)
        return f"constant '{self.name}' is {shown}, captured {self.constant!r}"


class InputsCheck:
    """Compares inputs with the examples of a capture: about 1 us for a dozen that match.

    Attributes:
        specs: of the examples.
        without_wrappers: takes a text, and names parts of the callable as its user does.
        fits: whether inputs, as many as the examples, certainly match.

    Raises:
        TypeError: an example is neither a tensor nor a plain constant.
    """

    def __init__(self, function: Callable[..., Any], examples: Sequence[Input]) -> None:
        names = parameter_names(function, len(examples))
        self.without_wrappers = _without_wrappers(function)
        self.specs = tuple(InputSpec.of(n, v) for n, v in zip(names, examples, strict=True))
        self.fits = _native_check(examples) or self._fit

    def mismatch(self, inputs: Sequence[object]) -> str | None:
        """Name the first input that differs from its example, or return None."""
        if len(inputs) != len(self.specs):
            names = ", ".join(spec.name for spec in self.specs)
            return f"{len(inputs)} inputs, captured {len(self.specs)} ({names})"
        if self.fits(*inputs):
            return None
        for spec, value in zip(self.specs, inputs, strict=True):
            if difference := spec.mismatch(value):
                return difference
        return None

    def _fit(self, *inputs: object) -> bool:
        return not any(spec.mismatch(v) for spec, v in zip(self.specs, inputs, strict=True))


def _without_wrappers(function: object) -> Callable[[str], str]:
    path: list[str] = []
    while name := getattr(type(function), "wrapper_of", ""):
        path.append(name)
        function = getattr(function, name)
    nested, dotted = "".join(f"._modules['{name}']" for name in path), ".".join([*path, ""])
    return lambda text: text.replace(nested, "").replace(dotted, "") if path else text


def _native_check(examples: Sequence[Input]) -> Callable[..., bool] | None:
    # Several times faster than Python. What it rejects is compared again.
    check = native_tensor_check([value for value in examples if isinstance(value, Tensor)])
    if check is None:
        return None
    constants = [(i, v) for i, v in enumerate(examples) if not isinstance(v, Tensor)]
    if not constants:
        return check
    indices = [i for i, value in enumerate(examples) if isinstance(value, Tensor)]

    def fits(*inputs: Any) -> bool:
        for index, value in constants:
            given = inputs[index]
            if given is not value and (type(given) is not type(value) or given != value):
                return False
        return check(*[inputs[index] for index in indices])

    return fits


def memory_shared_by(function: Callable[..., Any], inputs: Sequence[Input]) -> str:
    """Name an input that overlaps another, or a parameter or buffer of the callable; else empty."""
    names = parameter_names(function, len(inputs))
    given = [(n, byte_range(v)) for n, v in zip(names, inputs, strict=True) if has_memory(v)]
    for (name, one), (other, two) in combinations(given, 2):
        if ranges_overlap(one, two):
            return f"inputs '{name}' and '{other}' share memory"
    for own, tensor in tensors_of(function):
        if not has_memory(tensor):
            continue
        range_of_own = byte_range(tensor)
        for name, one in given:
            if ranges_overlap(one, range_of_own):
                return f"input '{name}' shares memory with '{own}'"
    return ""


class DistinctInputs:
    """Checks that no two inputs are the same tensor, in a fraction of a microsecond.

    A graph without guards of its own is only valid for inputs that are distinct, as its examples.

    Args:
        function: takes the inputs.
        indices: of those that are tensors.
    """

    def __init__(self, function: Callable[..., Any], indices: Sequence[int]) -> None:
        self._names = parameter_names(function, max(indices, default=-1) + 1)
        self._indices = [*indices]

    def mismatch(self, inputs: Sequence[Input]) -> str:
        """Name two inputs that are the same tensor, or return an empty string."""
        indices = self._indices
        if len({id(inputs[index]) for index in indices}) == len(indices):
            return ""
        first: dict[int, str] = {}
        for index in indices:
            before = first.setdefault(id(inputs[index]), self._names[index])
            if before != self._names[index]:
                return f"inputs '{before}' and '{self._names[index]}' are one tensor"
        return ""


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Parameters of a callable or module by name; none of a builtin without a signature."""
    target = function.forward if isinstance(function, nn.Module) else function
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return {}


def parameter_names(function: Callable[..., Any], count: int) -> list[str]:
    """Names of the first `count` positional parameters of a callable or module."""
    names: list[str] = [*getattr(function, "flat_input_names", ())]
    for parameter in parameters_of(function).values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{i}]" for i in range(count - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return (names + [f"input {i}" for i in range(len(names), count)])[:count]


def overlaps(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors overlap in memory."""
    have_memory = has_memory(one) and has_memory(other)
    return have_memory and ranges_overlap(byte_range(one), byte_range(other))


def has_memory(value: Any) -> bool:
    """Whether an input is a strided tensor with elements in memory."""
    is_strided = isinstance(value, Tensor) and value.layout is torch.strided
    return is_strided and value.numel() > 0 and value.data_ptr() > 0


def byte_range(tensor: Any) -> tuple[int, int]:
    """The first address of a strided tensor, and the one after its last element."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()


def ranges_overlap(one: tuple[int, int], two: tuple[int, int]) -> bool:
    """Whether two ranges of addresses overlap."""
    return one[0] < two[1] and two[0] < one[1]


def _short(value: object) -> str:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else str(value)


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function, or of the class of another callable."""
    return getattr(function, "__name__", None) or type(function).__name__


def variants_of(function: Callable[..., Any]) -> Sequence[Callable[..., Any]]:
    """Equivalent callables, the one to trace first, then simpler ones.

    A callable offers them by a method ``capture_variants()``.
    """
    variants = getattr(function, "capture_variants", None)
    return (function,) if variants is None else variants()


def tensors_of(function: Callable[..., Any]) -> list[tuple[str, Tensor]]:
    """The parameters and buffers of a module by name; none of another callable."""
    if not isinstance(function, nn.Module):
        return []
    return [*function.named_parameters(), *function.named_buffers()]


def with_own_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap a function so that it shares no compile cache with any other.

    Dynamo caches and counts compiles per code object.
    """

    def call(*inputs: Any) -> Any:
        return function(*inputs)

    code = call.__code__.replace(co_name=name, co_qualname=name)
    return FunctionType(code, call.__globals__, name, None, call.__closure__)
