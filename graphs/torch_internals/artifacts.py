"""Saves and loads graphs that inductor compiled, with a layout of the tensors that they take."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.utils import _pytree as pytree

from graphs.capture.contract import Frozen, Job
from graphs.capture.export_state import State, bind_state, constant_of, why_stale
from graphs.capture.inputs import Input
from graphs.torch_internals.headers import wait_for_probes
from graphs.torch_internals.replay.replay import replay_loads
from graphs.torch_internals.vectors import trust_vectors
from graphs.watch.causes import describe_failure

__all__ = ["ArtifactCompiler", "build_package", "can_store", "load_package", "read"]

_GRAPH = "graph.bin"
_LAYOUT = "graph.json"


def can_store() -> bool:
    """Whether this torch can save a graph that inductor compiled."""
    return hasattr(torch._inductor, "CompiledArtifact")


def build_package(program: Any, path: Path, options: Mapping[str, Any] | None) -> None:
    """Compile an exported program into an AOTInductor package."""
    torch._inductor.aoti_compile_and_package(
        program, package_path=str(path), inductor_configs=dict(options) if options else None
    )


def load_package(path: Path) -> Callable[[list[Any]], Sequence[Any]]:
    """Load the function of a package, which takes and returns a list of tensors."""
    run: Callable[[list[Any]], Sequence[Any]]
    run = torch._inductor.aoti_load_package(str(path)).loader.run
    return run


def read(folder: Path, function: Callable[..., Any]) -> Frozen:
    """Load a graph with the guards of its symbolic sizes; traces and compiles nothing.

    Raises:
        ValueError: the parameters and buffers of `function` differ from those it was compiled for.
    """
    layout: dict[str, Any] = json.loads((folder / _LAYOUT).read_bytes())
    run = bind_state(function, layout, lambda: _load(folder / _GRAPH))
    why_not = partial(_why_not, layout)
    guards: dict[str, Any] = {"why_not": why_not, "why_not_sizes": why_not}
    return Frozen(run, stale=why_stale, is_loaded=True, **guards)


def _why_not(layout: Mapping[str, Any], examples: Sequence[Input]) -> str:
    """Return the first guard that fails, with inputs as `L['inputs'][i]`, or an empty string."""
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

    inputs = {"L": {"inputs": [*examples]}}
    for guard in layout["guards"]:
        try:
            if not eval(guard, SYMPY_INTERP, inputs):
                return str(guard)
        except Exception as error:
            return f"{guard} cannot be checked: {describe_failure(error)}"
    return ""


class ArtifactCompiler:
    """A Dynamo backend that captures the artifact of inductor, and the tensors of the first run.

    Args:
        job: has options of inductor.

    Attributes:
        failure: of inductor, or None.
    """

    def __init__(self, job: Job) -> None:
        self.failure: Exception | None = None
        self._options = dict(job.options["options"] or {})
        self._is_symbolic = bool(job.dims)
        self._shapes: Any = None
        self._placeholders: list[Any] = []
        self._artifact: Any = None
        self._inputs: Sequence[Any] = ()
        self._outputs: Sequence[Any] = ()
        self._has_constants = False

    def __call__(self, graph: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph of Dynamo."""
        self.failure = None
        self._has_constants = any(
            isinstance(value, Tensor) for part in graph.modules() for value in _values_of(part)
        )
        if self._is_symbolic:
            nodes = graph.graph.find_nodes(op="placeholder")
            self._placeholders = [node.meta["example_value"] for node in nodes]
            tracing: Any = TracingContext.get()
            self._shapes = tracing.fake_mode.shape_env
        wait_for_probes()
        try:
            self._artifact = torch._inductor.standalone_compile(
                graph,
                list(self._placeholders or example_inputs),  # the former have the symbols
                dynamic_shapes="from_tracing_context" if self._shapes else "from_example_inputs",
                options={"config_patches": self._options},
                aot=True,
            )
        except Exception as error:
            self.failure = error
            raise
        call: Any = self._note

        def run(*inputs: Any) -> Any:
            nonlocal call
            now, call = call, self._artifact
            return now(*inputs)

        return run

    def _note(self, *inputs: Any) -> Any:
        self._inputs = inputs
        self._outputs = self._artifact(*inputs)
        return self._outputs

    def write(self, folder: Path, job: Job, result: Any) -> None:
        """Write the graph and its layout; `result` is what the first run returned.

        Raises:
            ValueError: the source of a tensor is unknown.
            Exception: the `failure`, if there was one.
        """
        if self.failure is not None:
            raise self.failure
        try:
            layout = self._layout(job, result)
        finally:
            # Frees the tensors of the first run, and the trace.
            self._inputs, self._outputs, self._placeholders, self._shapes = (), (), [], None
        self._artifact.save(path=str(folder / _GRAPH), format="binary")
        (folder / _LAYOUT).write_text(json.dumps(layout), "utf-8")

    def _layout(self, job: Job, result: Any) -> dict[str, Any]:
        # Tensors are recognised by identity.
        if self._has_constants:
            raise ValueError("tensors are constants of the graph: make them inputs, or buffers")
        state, examples = State(job.function), job.examples
        known = {id(tensor): ["state", i] for i, tensor in enumerate(state.now())}
        known |= {id(x): ["input", i] for i, x in enumerate(examples) if isinstance(x, Tensor)}
        given = enumerate(self._inputs)
        takes = [
            known.get(id(x)) if isinstance(x, Tensor) else self._size_of(place, known)
            for place, x in given
        ]
        if strange := [place for place, take in enumerate(takes) if take is None]:
            raise ValueError(
                f"{len(strange)} tensors are neither inputs, parameters nor buffers: make them so"
            )
        leaves, spec = pytree.tree_flatten(result)
        if self._is_symbolic and any(_may_be_of_a_size(leaf, examples) for leaf in leaves):
            raise ValueError("it returns numbers that may depend on a size: return tensors alone")
        sources = known | {id(tensor): ["made", i] for i, tensor in enumerate(self._outputs)}
        return {
            "takes": takes,
            "guards": self._guards(takes),
            "leaves": [sources.get(id(leaf)) or ["constant", constant_of(leaf)] for leaf in leaves],
            "spec": pytree.treespec_dumps(spec),
            "tensors": [i for i, value in enumerate(examples) if isinstance(value, Tensor)],
            "state": state.layout(),
        }

    def _size_of(self, place: int, known: Mapping[int, list[Any]]) -> list[Any] | None:
        """Find the input dimension whose size is the argument at a place."""
        symbol = self._placeholders[place].node.expr
        for tensor, value in zip(self._placeholders, self._inputs, strict=True):
            for dim, size in enumerate(getattr(tensor, "shape", ())):
                own = known.get(id(value))
                if isinstance(size, torch.SymInt) and size.node.expr == symbol and own:
                    return ["size", own[1], dim] if own[0] == "input" else None
        return None

    def _guards(self, takes: Sequence[Any]) -> list[str]:
        """Conditions on the sizes of the inputs, as Python expressions."""
        if self._shapes is None:
            return []
        from torch._dynamo.source import GetItemSource, LocalSource  # a load needs none

        inputs = {place: i for place, (kind, i, *_) in enumerate(takes) if kind == "input"}
        guards: list[str] = self._shapes.produce_guards(
            [self._placeholders[place] for place in inputs],
            [GetItemSource(LocalSource("inputs"), i) for i in inputs.values()],
            ignore_static=False,
        )
        return guards


def _load(path: Path) -> Callable[[list[Tensor]], Sequence[Any]]:
    inductor: Any = torch._inductor
    with trust_vectors(), replay_loads():
        graph = inductor.CompiledArtifact.load(path=str(path), format="binary")
    return lambda tensors: graph(*tensors)


def _values_of(part: Any) -> Iterator[Any]:
    yield from part.__dict__.values()
    yield from part._parameters.values()
    yield from part._buffers.values()


def _may_be_of_a_size(leaf: Any, examples: Sequence[Input]) -> bool:
    """Whether a returned number may depend on a size of an input."""
    if not isinstance(leaf, int | float) or isinstance(leaf, bool):
        return False
    sizes = {size for value in examples if isinstance(value, Tensor) for size in value.shape}
    given = {value for value in examples if isinstance(value, int | float)}
    return leaf not in given or leaf in sizes
