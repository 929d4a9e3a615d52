"""Nested inputs and outputs: flattened to the tensors and constants that a graph takes."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from graphs.capture.inputs import (
    Input,
    check_inputs,
    parameter_names,
    parameters_of,
    variants_of,
)
from graphs.errors import InputMismatch
from graphs.torch_internals.pytrees import container_of

__all__ = ["CallStructure", "FlatCall", "Structure", "as_call", "by_position", "flat_call"]

_LEAVES = (Tensor, bool, int, float, str, type(None))


def is_flat(values: Iterable[Any]) -> bool:
    """Whether all values are tensors or plain constants."""
    return all(isinstance(each, _LEAVES) for each in values)


class Structure:
    """Containers of a nested value, with tensors and constants as leaves.

    `take` and `build` are compiled from source: a value of eight leaves takes about a microsecond,
    and Dynamo traces `build` without guards on the structure.

    Args:
        value: nested dicts, lists, tuples, and classes that are registered with torch.
        name: of the value, for errors and for the names of leaves.

    Attributes:
        names: of the leaves, with their path: ``cache['k'][0]``.
        leaves: of the value.
        leaves_of: takes a value of the same structure, returns its leaves; unchecked.
        build: takes leaves, returns a value of the same structure.

    Raises:
        TypeError: a leaf is neither a tensor nor a plain constant.
    """

    def __init__(self, value: Any, name: str) -> None:
        self._start()
        self._compile(self._add(value, name, "value"))

    def _start(self) -> None:
        self.names: list[str] = []
        self.leaves: list[Input] = []
        self._paths: list[str] = []
        self._conditions: list[str] = []
        self._globals: dict[str, Any] = {}

    def _compile(self, built: str) -> None:
        taken = "".join(f"{path}, " for path in self._paths)
        fits = " and ".join(self._conditions) or "True"
        source = (
            f"def take(value): return ({taken}) if {fits} else None\n"
            f"def leaves_of(value): return ({taken})\n"
            f"def build(leaves): return {built}\n"
        )
        exec(compile(source, "<structure of inputs>", "exec"), self._globals)
        self._take: Callable[[Any], tuple[Any, ...] | None] = self._globals["take"]
        self.leaves_of: Callable[[Any], tuple[Any, ...]] = self._globals["leaves_of"]
        self.build: Callable[[Sequence[Any]], Any] = self._globals["build"]

    def take(self, value: Any) -> tuple[Any, ...] | None:
        """Return the leaves of a value of the same structure; None if it differs."""
        try:
            return self._take(value)
        except (LookupError, AttributeError, TypeError, ValueError, RuntimeError):
            return None

    def _add(self, value: Any, name: str, path: str) -> str:
        """Add a value at a path; returns the source that builds it from the leaves."""
        try:
            container = container_of(value)
        except TypeError as error:
            raise TypeError(f"'{name}': {error}") from None
        if container is None:
            return self._add_leaf(value, name, path)
        kind = self._constant(type(value))
        self._conditions.append(f"type({path}) is {kind}")
        if hasattr(value, "__len__"):
            self._conditions.append(f"len({path}) == {len(value)}")
        if not isinstance(value, tuple) and type(value) not in (dict, list, OrderedDict):
            self._conditions.append(f"{self._constant(container.is_like)}({path})")
        steps = zip(container.children, container.paths, strict=True)
        parts = [self._add(child, name + step, path + step) for child, step in steps]
        if type(value) is dict:
            items = zip(value, parts, strict=True)
            return f"{{{', '.join(f'{key!r}: {part}' for key, part in items)}}}"
        inner = "".join(f"{part}, " for part in parts)
        if type(value) in (tuple, list):
            return f"({inner})" if type(value) is tuple else f"[{inner}]"
        return f"{self._constant(container.rebuild)}([{inner}])"

    def _add_leaf(self, value: Any, name: str, path: str) -> str:
        if not isinstance(value, _LEAVES):
            kind = type(value).__name__
            raise TypeError(
                f"'{name}' is a {kind}; expected tensors, constants (None, bool, int, float, str) "
                "and containers that torch knows: register a dataclass by "
                f"torch.export.register_dataclass({kind}), or pass what is in it"
            )
        self._paths.append(path)
        self.names.append(name)
        self.leaves.append(value)
        return f"leaves[{len(self.leaves) - 1}]"

    def _constant(self, value: Any) -> str:
        name = f"constant{len(self._globals)}"
        self._globals[name] = value
        return name


class CallStructure(Structure):
    """Structure of the inputs of a call.

    Inputs with a parameter may come by position or by keyword, however the example passes them.

    Args:
        function: takes the call.
        args, kwargs: of an example.

    Raises:
        TypeError: see :class:`Structure`.
    """

    def __init__(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self._start()
        self._function = function
        # Positional inputs by the name of their parameter, or by number where they have none.
        self._keys = keys = _parameters(function)
        if len(args) > len(keys):
            self._keys = keys = [*range(len(args))]
        inputs = {**dict(zip(keys, args, strict=False)), **kwargs}
        if len(inputs) < len(args) + len(kwargs):
            raise TypeError(f"input '{next(k for k in keys if k in kwargs)}' is passed twice")
        self._conditions.append(f"len(value) == {len(inputs)}")
        unnamed = parameter_names(function, len(args))
        built = [
            self._add(each, unnamed[key] if isinstance(key, int) else key, f"value[{key!r}]")
            for key, each in inputs.items()
        ]
        named = zip([*inputs][len(args) :], built[len(args) :], strict=True)
        pairs = ", ".join(f"{key!r}: {part}" for key, part in named)
        self._compile(f"([{', '.join(built[: len(args)])}], {{{pairs}}})")

    def flatten(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], where: str
    ) -> tuple[Any, ...]:
        """Return the flat inputs of a call, in the order of the example.

        Raises:
            InputMismatch: of the name `where`: an input is missing, unknown, or nested otherwise.
        """
        inputs: Mapping[Any, Any] = kwargs
        if args:
            inputs = {**dict(zip(self._keys, args, strict=False)), **kwargs}
        if len(inputs) == len(args) + len(kwargs) and (leaves := self.take(inputs)) is not None:
            return leaves
        raise InputMismatch(where, self._difference(args, kwargs))

    def _difference(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        try:
            got = CallStructure(self._function, args, kwargs).names
        except TypeError as error:
            return str(error)
        missing = [name for name in self.names if name not in got]
        unknown = [name for name in got if name not in self.names]
        wrong = [f"'{name}' is missing" for name in missing]
        wrong += [f"'{name}' is unknown" for name in unknown]
        return f"{', '.join(wrong) or 'containers differ'}; captured {', '.join(self.names)}"


class FlatCall(nn.Module):
    """Calls a function with flat inputs, in the order of a :class:`CallStructure`."""

    wrapper_of = "function"

    def __init__(
        self,
        function: Callable[..., Any],
        names: Sequence[str],
        build: Callable[[Sequence[Input]], tuple[list[Any], dict[str, Any]]],
    ) -> None:
        super().__init__()
        self.function = function
        self.training = getattr(function, "training", False)
        self.flat_input_names = (*names,)
        self._build = build

    def forward(self, *leaves: Input) -> Any:
        """Return what the function returns."""
        args, kwargs = self._build(leaves)
        return self.function(*args, **kwargs)

    def capture_variants(self) -> Sequence[Callable[..., Any]]:
        """Those of the function, see :func:`graphs.capture.inputs.variants_of`."""
        variants = variants_of(self.function)
        if len(variants) == 1:
            return [self]
        return [FlatCall(each, self.flat_input_names, self._build) for each in variants]


def as_call(inputs: object, source: str) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return positional and keyword inputs of a tuple or list, or of a mapping.

    Raises:
        NotInputs: `inputs`, which come from `source`, are something else.
    """
    check_inputs(inputs, source)
    return ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})  # type: ignore[return-value]


def by_position(
    names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], where: str
) -> tuple[Any, ...]:
    """Return the inputs of a call in the order of their names.

    Raises:
        InputMismatch: of the name `where`: an input is missing or unknown.
    """
    rest = names[len(args) :]
    if kwargs.keys() != {*rest}:
        got = ", ".join([*(names[: len(args)]), *kwargs])
        raise InputMismatch(where, f"inputs are {got}; captured {', '.join(names)}")
    return (*args, *(kwargs[name] for name in rest))


def flat_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], Sequence[Input], CallStructure | None]:
    """Return a callable of flat inputs, the inputs of this call, and their structure.

    The function itself, `args` and None if they are flat already.

    Raises:
        TypeError: see :class:`CallStructure`.
    """
    if not kwargs and is_flat(args):
        return function, args, None
    structure = CallStructure(function, args, kwargs)
    leaves, structure.leaves = structure.leaves, []  # the structure outlives the inputs
    return FlatCall(function, structure.names, structure.build), leaves, structure


def _parameters(function: Callable[..., Any]) -> list[Any]:
    """Names of the parameters that take positional inputs, or their number where they have none."""
    return [
        number if each.kind is inspect.Parameter.POSITIONAL_ONLY else each.name
        for number, each in enumerate(parameters_of(function).values())
        if each.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
