"""Backend `inductor` with a store: a later process loads what one has compiled.

Persisting inductor's own cache is not enough for a second start in seconds: Dynamo still traces
every bucket. Here the graph that inductor compiled is kept whole, with a note of which of its
inputs are whose, so that loading it traces nothing and compiles nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphs.backends.export_state import State, constant_of, restored
from graphs.backends.inductor import InductorBackend, compile_only, freeze
from graphs.capture.contract import Frozen
from graphs.capture.inputs import Input, memory_shared_by
from graphs.store.store import ArtifactStore
from graphs.store.stored import StoredBackend

__all__ = ["StoredInductor"]

_GRAPH = "graph.bin"
_LAYOUT = "graph.json"


class StoredInductor(StoredBackend, InductorBackend):
    """Captures as backend `inductor` does, but loads what the store has, and stores what it lacks.

    A loaded graph has no guards of Dynamo: its store's key and the checks of a
    :class:`~graphs.CapturedGraph` take their place. An attribute or a global that changes *after*
    the graph was loaded goes unnoticed, as with backend `aoti`; one that changed before does not.

    Args:
        store: where graphs are.
        seal: called after each capture, as a loaded graph may have compiled its kernels; for
            :meth:`InductorCache.seal`.

    Attributes: see :class:`~graphs.store.stored.StoredBackend`.
    """

    def __init__(self, store: ArtifactStore, seal: Callable[[], object] | None = None) -> None:
        InductorBackend.__init__(self)
        StoredBackend.__init__(self, store)
        self._seal = seal or (lambda: None)

    def available(self) -> str | None:
        """Needs what backend `inductor` needs, and a torch that can store what it compiled."""
        if not hasattr(torch._inductor, "CompiledArtifact"):
            return "this torch cannot store what it compiled: use backend 'inductor' by its name"
        return super().available()

    def capture(
        self,
        function: Callable[..., Any],
        example_inputs: Sequence[Input],
        *,
        name: str,
        warm_runs: int,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Frozen:
        """Load the graph, or compile it in the first run and store it."""
        settings: dict[str, Any] = {"name": name, "warm_runs": warm_runs}
        factors = self._factors(function, example_inputs, mode, options)
        if isinstance(factors, str):
            self.not_stored(name, factors)
            return super().capture(function, example_inputs, mode=mode, options=options, **settings)

        def make(folder: Path) -> tuple[Frozen, Callable[[], object]]:
            compiler = _Keeping(options or {})
            frozen, result = freeze(function, example_inputs, compiler, **settings)
            return frozen, lambda: compiler.write(folder, function, example_inputs, result)

        frozen = self.load_or_store(factors, function, example_inputs, make, **settings)
        self._seal()  # also of one that was loaded: another environment compiles its kernels then
        return frozen

    def has(
        self,
        function: Callable[..., Any],
        example_inputs: Sequence[Input],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> bool:
        """Whether a capture would find the graph, if it is not damaged."""
        factors = self._factors(function, example_inputs, mode, options)
        return not isinstance(factors, str) and self.store.has(factors)

    def precompile(
        self,
        function: Callable[..., Any],
        example_inputs: Sequence[Input],
        *,
        name: str,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Compile what the store lacks into inductor's cache on disk; runs and stores nothing."""
        if mode is not None:
            super().precompile(function, example_inputs, name=name, mode=mode, options=options)
        elif not self.has(function, example_inputs, options=options):
            compile_only(function, example_inputs, _Keeping(options or {}), name=name)

    def read(self, folder: Path, function: Callable[..., Any]) -> Callable[..., Any]:
        """Load the graph; nothing is traced or compiled.

        Raises:
            ValueError: the parameters and buffers of `function` are not those it was compiled for.
        """
        layout = json.loads((folder / _LAYOUT).read_bytes())
        return restored(function, layout, lambda: _load(folder / _GRAPH))

    def _factors(
        self,
        function: Callable[..., Any],
        examples: Sequence[Input],
        mode: str | None,
        options: Mapping[str, Any] | None,
    ) -> dict[str, Any] | str:
        if mode is not None:
            return f"mode={mode!r} is resolved by torch.compile itself: give options instead"
        if torch.is_grad_enabled():
            return "grad mode is enabled: capture under torch.no_grad()"
        if shared := memory_shared_by(function, examples):
            return f"{shared}: give each memory of its own"
        return self.factors(function, examples, options)


class _Keeping:
    """A compiler for Dynamo that keeps what inductor made, and the tensors of the first run."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._artifact: Any = None
        self._inputs: Sequence[Any] = ()
        self._outputs: Sequence[Any] = ()
        self._has_constants = False

    def __call__(self, graph: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self._has_constants = any(
            isinstance(value, Tensor) for part in graph.modules() for value in _values_of(part)
        )
        self._artifact = torch._inductor.standalone_compile(
            graph,
            list(example_inputs),
            dynamic_shapes="from_example_inputs",
            options={"config_patches": self._options},
            aot=True,
        )
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

    def write(
        self, folder: Path, function: Callable[..., Any], examples: Sequence[Input], result: Any
    ) -> None:
        """Write the graph, and whose tensors it takes and makes: `result` is of the first run.

        Raises:
            ValueError: a later process could not know whose a tensor is.
        """
        try:
            layout = self._layout(function, examples, result)
        finally:
            self._inputs = self._outputs = ()  # nobody needs the tensors of the first run any more
        self._artifact.save(path=str(folder / _GRAPH), format="binary")
        (folder / _LAYOUT).write_text(json.dumps(layout), "utf-8")

    def _layout(
        self, function: Callable[..., Any], examples: Sequence[Input], result: Any
    ) -> dict[str, Any]:
        # Tensors are recognised by their identity.
        if self._has_constants:
            raise ValueError("tensors are constants of the graph: make them inputs, or buffers")
        state = State(function)
        known = {id(tensor): ["state", i] for i, tensor in enumerate(state.now())}
        known |= {id(x): ["input", i] for i, x in enumerate(examples) if isinstance(x, Tensor)}
        if strange := [i for i, tensor in enumerate(self._inputs) if id(tensor) not in known]:
            raise ValueError(
                f"{len(strange)} tensors are neither inputs, parameters nor buffers: make them so"
            )
        leaves, spec = pytree.tree_flatten(result)
        places = known | {id(tensor): ["made", i] for i, tensor in enumerate(self._outputs)}
        return {
            "takes": [known[id(tensor)] for tensor in self._inputs],
            "leaves": [places.get(id(leaf)) or ["constant", constant_of(leaf)] for leaf in leaves],
            "spec": pytree.treespec_dumps(spec),
            "tensors": [i for i, value in enumerate(examples) if isinstance(value, Tensor)],
            "state": state.layout(),
        }


def _load(path: Path) -> Callable[[list[Tensor]], Sequence[Any]]:
    inductor: Any = torch._inductor
    with _known_processor(), _no_headers():
        graph = inductor.CompiledArtifact.load(path=str(path), format="binary")
    return lambda tensors: graph(*tensors)


@contextlib.contextmanager
def _known_processor() -> Iterator[None]:
    # Inductor starts a process to see whether vector code runs here. That it does when the graph
    # was compiled, and the processor is one of the factors.
    from torch._inductor import config, cpu_vec_isa

    found: Any = getattr(cpu_vec_isa, "valid_vec_isa_list", None)
    if not hasattr(found, "cache_clear") or found.cache_info().currsize:
        yield
        return
    try:
        with config.patch({"cpp.vec_isa_ok": True}):
            yield
    finally:
        found.cache_clear()


@contextlib.contextmanager
def _no_headers() -> Iterator[None]:
    # Inductor preprocesses its headers in each process, to compile kernels faster. Here none is
    # compiled, but where inductor's cache has lost one.
    codecache: Any = importlib.import_module("torch._inductor.codecache")
    precompile = getattr(codecache, "_precompile_header", None)
    if precompile is None:
        yield
        return
    codecache._precompile_header = lambda *_, **__: None
    try:
        yield
    finally:
        codecache._precompile_header = precompile


def _values_of(part: Any) -> Iterator[Any]:
    yield from part.__dict__.values()
    yield from part._parameters.values()
    yield from part._buffers.values()
