"""Turns a callable into a function of all tensors that it reads, and back once compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from graphs.capture.inputs import DistinctInputs, Input, InputsCheck, InputSpec
from graphs.capture.module_state import ModuleState

__all__ = [
    "State",
    "StateChanged",
    "Stateless",
    "bind_state",
    "constant_of",
    "constants_of_others",
    "needs_gradients",
    "why_stale",
]


class StateChanged(RuntimeError):
    """A module or one of its tensors differs from what a graph was built for; nothing ran."""


def why_stale(error: Exception) -> str | None:
    """Return the reason if an error of a run means that the graph no longer holds."""
    return str(error) if isinstance(error, StateChanged) else None


class State:
    """The current parameters and buffers of a module, each once; none of another callable."""

    def __init__(self, function: Callable[..., Any]) -> None:
        named = _named_tensors(function) if isinstance(function, nn.Module) else ()
        self.homes: list[list[_Home]] = []
        known: dict[int, list[_Home]] = {}
        self.specs: list[InputSpec] = []
        for name, home in named:
            tensor = home.tensors[home.key]
            if id(tensor) not in known:
                known[id(tensor)] = []
                self.homes.append(known[id(tensor)])
                self.specs.append(InputSpec.of(name, tensor))
            known[id(tensor)].append(home)
        self._first = [homes[0] for homes in self.homes]
        self._check = InputsCheck(lambda *tensors: None, [own[key] for own, key in self._first])

    def layout(self) -> list[list[str]]:
        """Name, shape, dtype, device and stride of each, as text."""
        return [
            [spec.name, str(spec.shape), str(spec.dtype), str(spec.device), str(spec.stride)]
            for spec in self.specs
        ]

    def expect(self, built: Sequence[Sequence[str]]) -> None:
        """Raise ValueError unless the tensors have the :meth:`layout` of those in a package."""
        for there, own in zip_longest(built, self.layout()):
            if there != own:
                raise ValueError(f"the package was built with {there}, got {own}: capture it again")

    def now(self) -> list[Tensor]:
        """Return the tensors, including those that replaced others since.

        Raises:
            StateChanged: one has another shape, dtype, device or stride.
        """
        tensors = [tensors[key] for tensors, key in self._first]
        if not self._check.fits(*tensors):
            for spec, tensor in zip(self.specs, tensors, strict=True):
                if difference := spec.mismatch(tensor):
                    raise StateChanged(difference)
        return tensors

    @contextmanager
    def replaced_by(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Replace the tensors inside the context.

        Raises:
            ValueError: the module itself replaced one, instead of writing in place.
        """
        slots = [(*home, i) for i, homes in enumerate(self.homes) for home in homes]
        before = [own[key] for own, key, _ in slots]
        try:
            for own, key, i in slots:
                own[key] = tensors[i]
            yield
            changed = [i for own, key, i in slots if own[key] is not tensors[i]]
        finally:
            for (own, key, _), tensor in zip(slots, before, strict=True):
                own[key] = tensor
        if changed:
            name = self.specs[changed[0]].name
            raise ValueError(
                f"the module replaces {name}, expected writes in place: use self.{name}.copy_(...)"
            )


class Returned:
    """What a callable returned: `leaves` as in :func:`bind_state`, and the pytree's spec."""

    # A separate object: export undoes assignments to the module that it traces.
    leaves: Sequence[list[Any]] = ()
    spec: Any = None


class Stateless(nn.Module):
    """Takes the tensor inputs of a callable, then its state; returns the tensors it makes.

    Attributes:
        indices: indices of the inputs that are tensors; the others are fixed.
        takes: the source of each tensor it takes, as in :func:`bind_state`.
        returned: what the last call returned.
    """

    def __init__(self, function: Callable[..., Any], examples: Sequence[Input]) -> None:
        super().__init__()
        self._function: Callable[..., Any]
        object.__setattr__(self, "_function", function)  # no submodule: its tensors are inputs
        self._examples = list(examples)
        self.state = State(function)
        self.indices = [i for i, value in enumerate(examples) if isinstance(value, Tensor)]
        self.takes = [["input", index] for index in self.indices]
        self.takes += [["state", i] for i in range(len(self.state.specs))]
        self.returned = Returned()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Call the callable on `tensors` in place of its own."""
        inputs = list(self._examples)
        for index, tensor in zip(self.indices, tensors, strict=False):
            inputs[index] = tensor
        with self.state.replaced_by(tensors[len(self.indices) :]):
            leaves, self.returned.spec = pytree.tree_flatten(self._function(*inputs))
        own = {id(tensor): take for tensor, take in zip(tensors, self.takes, strict=True)}
        made: list[Tensor] = []
        sources: list[list[Any]] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor) and id(leaf) not in own:
                sources.append(["made", len(made)])
                made.append(leaf)
            else:
                sources.append(own.get(id(leaf), ["constant", leaf]))
        self.returned.leaves = sources
        return tuple(made)


def constant_of(leaf: object) -> object:
    """Return a constant that JSON can hold; raise ValueError for anything else."""
    if isinstance(leaf, (bool, int, float, str, type(None))):
        return leaf
    raise ValueError(f"returns a {type(leaf).__name__}; expected tensors and constants")


def bind_state(
    function: Callable[..., Any],
    layout: Mapping[str, Any],
    load: Callable[[], Callable[[list[Any]], Sequence[Any]]],
) -> Callable[..., Any]:
    """Return a function that calls a compiled graph of flat tensors like its callable.

    It reads the state of the callable at each call, and raises `StateChanged` if a module is not as
    it is now, see `ModuleState`.

    Args:
        function: the callable.
        layout: what the graph `takes`: `["input", i]`, `["state", i]`, or `["size", i, dim]` for
            the size of an input; the `leaves` that are returned: one of these, `["made", i]` or
            `["constant", value]`; their pytree `spec`; indices of `tensors` among the inputs;
            `state`, a :meth:`State.layout`.
        load: loads the graph; called after the state was checked.

    Raises:
        ValueError: the state differs from `layout`.
    """
    state = State(function)
    state.expect(layout["state"])
    graph, leaves, spec = load(), layout["leaves"], pytree.treespec_loads(layout["spec"])
    is_one_tensor = leaves == [["made", 0]] and spec.is_leaf()
    takes = [(kind == "state", i) for kind, i, *_ in layout["takes"]]
    sizes = [(index, take[2]) for index, take in enumerate(layout["takes"]) if take[0] == "size"]
    distinct = DistinctInputs(function, layout["tensors"])
    changed = ModuleState.of(function).changed

    def run(*inputs: Input) -> Any:
        if what := changed():
            raise StateChanged(what)
        if shared := distinct.mismatch(inputs):
            raise StateChanged(f"{shared}, captured apart")
        own: Sequence[Any] = state.now()
        given: list[Any] = [own[i] if is_own else inputs[i] for is_own, i in takes]
        for index, dim in sizes:
            given[index] = given[index].shape[dim]
        made = graph(given)
        if is_one_tensor:
            return made[0]
        sources = {"made": made, "input": inputs, "state": own}
        values = (v if kind == "constant" else sources[kind][v] for kind, v in leaves)
        return pytree.tree_unflatten(values, spec)

    return run


def needs_gradients(function: Callable[..., Any], inputs: Sequence[Input]) -> bool:
    """Whether autograd would record this call."""
    tensors = [*State(function).now(), *(each for each in inputs if isinstance(each, Tensor))]
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def constants_of_others(program: Any, function: Callable[..., Any]) -> str:
    """Names of an exported program's constants that are tensors of someone else, or empty."""
    found = _tensors_around(function)
    around = {tensor.data_ptr(): name for name, tensor in found if tensor.numel()}
    constants = [value for value in program.constants.values() if isinstance(value, Tensor)]
    constants += program.state_dict.values()
    return ", ".join(around[value.data_ptr()] for value in constants if value.data_ptr() in around)


def _tensors_around(function: Callable[..., Any]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(function, nn.Module):
        yield from _attributes(function)
        function = type(function).forward
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    cells = zip(code.co_freevars, function.__closure__ or (), strict=False)
    found = {name: cell.cell_contents for name, cell in cells}
    found |= {n: function.__globals__[n] for n in code.co_names if n in function.__globals__}
    found |= {f"default {i}": value for i, value in enumerate(function.__defaults__ or ())}
    for name, value in found.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, nn.Module):
            yield from ((f"{name}.{inner}", t) for inner, t in value.named_parameters())
            yield from ((f"{name}.{inner}", t) for inner, t in value.named_buffers())


def _attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor):
                yield f"{path}.{name}".lstrip("."), value


class _Home(NamedTuple):
    tensors: dict[str, Any]
    key: str


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, _Home]]:
    for path, part in module.named_modules():
        for tensors in (part._parameters, part._buffers):
            for key, tensor in tensors.items():
                if tensor is not None:
                    yield f"{path}.{key}".lstrip("."), _Home(tensors, key)
