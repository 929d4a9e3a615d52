"""Backend `inductor` with a memory: what it captured once, a later process loads.

Persisting inductor's own cache is not enough for a second start in seconds: Dynamo still traces
every bucket. Here the graph that inductor compiled is kept whole, with a note of which of its
inputs are whose, so that loading it traces nothing and compiles nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphs.backends.direct import direct_path, without_records
from graphs.backends.export_state import State, StateChanged
from graphs.backends.inductor import InductorBackend, _compile_once, _why_not, _why_stale
from graphs.capture.contract import CaptureError, Frozen
from graphs.capture.inputs import Input
from graphs.capture.own_code import alone
from graphs.capture.shared_memory import Apart, memory_shared_by
from graphs.store.known import UNTOLD, KnownCode
from graphs.store.label import describe
from graphs.store.misses import Misses
from graphs.store.store import ArtifactStore
from graphs.watch.causes import describe_failure

__all__ = ["StoredInductor"]

_log = logging.getLogger(__name__)

_GRAPH = "graph.bin"
_LAYOUT = "graph.json"
_CONSTANTS = (bool, int, float, str, type(None))


class StoredInductor:
    """Captures as backend `inductor` does, but loads what the store has, and stores what it lacks.

    A loaded graph has no guards of Dynamo: its store's key and the checks of a
    :class:`~graphs.CapturedGraph` take their place. An attribute or a global that changes *after*
    the graph was loaded goes unnoticed, as with backend `aoti`; one that changed before does not.

    Args:
        store: where graphs are.
        seal: called after each capture that compiled; for :meth:`InductorCache.seal`.

    Attributes:
        loaded: how many graphs came from the store.
        stored: how many went to it.
        misses: the graphs that it did not have, each with the reason; a reason is logged once.
    """

    name = "inductor"

    def __init__(self, store: ArtifactStore, seal: Callable[[], object] | None = None) -> None:
        self.store = store
        self.loaded = self.stored = 0
        self.misses = Misses()
        self._code = KnownCode()
        self._seal = seal or (lambda: None)
        self._inductor = InductorBackend()

    def available(self) -> str | None:
        """Needs what backend `inductor` needs, and a torch that can store what it compiled."""
        if not hasattr(torch._inductor, "CompiledArtifact"):
            return "this torch cannot store what it compiled: use backend 'inductor' by its name"
        return self._inductor.available()

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
        factors = self._factors(function, example_inputs, mode, options)
        if isinstance(factors, str):
            _log.warning("%s: not stored: %s", name, factors)
            return self._inductor.capture(
                function, example_inputs, name=name, warm_runs=warm_runs, mode=mode, options=options
            )
        if (frozen := self._load(factors, function, example_inputs, name, warm_runs)) is not None:
            return frozen
        try:
            frozen, kept = _capture(function, example_inputs, name, warm_runs, options or {})
        except Exception as error:
            raise CaptureError(name, _why_not(error)) from error
        self._put(factors, kept, function, example_inputs, name)
        self._seal()
        return frozen

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
        if self.has(function, example_inputs, mode=mode, options=options):
            return
        if mode is not None:
            self._inductor.precompile(
                function, example_inputs, name=name, mode=mode, options=options
            )
            return
        keeping = _Keeping(options or {}, runs=False)
        with without_records(), contextlib.suppress(_Compiled):
            _compile_once(alone(function, name), keeping, None, None)(*example_inputs)

    def prepare(self) -> None:
        """As backend `inductor` does."""
        self._inductor.prepare()

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

    def why_no_precompile(self) -> str:
        """Why :meth:`precompile` does not work here, or an empty string."""
        return self._inductor.why_no_precompile()

    def _factors(
        self,
        function: Callable[..., Any],
        examples: Sequence[Input],
        mode: str | None,
        options: Mapping[str, Any] | None,
    ) -> dict[str, Any] | str:
        """What the graph depends on, or why it is not stored."""
        if mode is not None:
            return f"mode={mode!r} is torch.compile's own affair: give options instead"
        if torch.is_grad_enabled():
            return "grad mode is enabled: capture under torch.no_grad()"
        if shared := memory_shared_by(function, examples):
            return f"{shared}: give each memory of its own"
        factors = self._code.factors(function, examples, backend="inductor", options=options)
        return UNTOLD if factors is None else factors

    def _load(
        self,
        factors: Mapping[str, Any],
        function: Callable[..., Any],
        examples: Sequence[Input],
        name: str,
        warm_runs: int,
    ) -> Frozen | None:
        try:
            is_there = self.store.has(factors)
            with self.store.use(factors) as folder:
                run = _load(folder, function) if folder else None
            if run is None:
                if not is_there:  # or else it was thrown away, which was told
                    self.misses.note(self.store, factors, name)
                return None
        except Exception as error:  # a store that is busy or gone, a torch that cannot read it
            _log.warning("%s: compiled again, not loaded: %s", name, describe_failure(error))
            return None
        try:
            for _ in range(warm_runs):
                run(*examples)
        except Exception as error:
            raise CaptureError(name, _why_not(error)) from error
        self.loaded += 1
        return Frozen(run, stale=_why_loaded_is_stale, is_loaded=True)

    def _put(
        self,
        factors: Mapping[str, Any],
        kept: _Kept,
        function: Callable[..., Any],
        examples: Sequence[Input],
        name: str,
    ) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="graphs-store-") as folder:
                layout = kept.layout(function, examples)
                kept.artifact.save(path=str(Path(folder, _GRAPH)), format="binary")
                Path(folder, _LAYOUT).write_text(json.dumps(layout), "utf-8")
                about = describe(function, name)
                self.stored += self.store.put(factors, folder, about=about)
        except Exception as error:  # the graph works: only the next process has to compile again
            _log.warning("%s: not stored: %s", name, describe_failure(error))
        finally:
            kept.forget()


class _Compiled(Exception):
    pass


class _Keeping:
    """A compiler for Dynamo that keeps what inductor made, and the tensors of the first run."""

    def __init__(self, options: Mapping[str, Any], runs: bool = True) -> None:
        self._options = dict(options)
        self._runs = runs
        self.artifact: Any = None
        self.inputs: Sequence[Any] = ()
        self.outputs: Sequence[Any] = ()
        self.has_constants = False

    def __call__(self, graph: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.has_constants = any(
            isinstance(value, Tensor) for part in graph.modules() for value in _values_of(part)
        )
        self.artifact = torch._inductor.standalone_compile(
            graph,
            list(example_inputs),
            dynamic_shapes="from_example_inputs",
            options={"config_patches": self._options},
            aot=True,
        )
        call: Any = self._note if self._runs else self._refuse

        def run(*inputs: Any) -> Any:
            nonlocal call
            now, call = call, self.artifact
            return now(*inputs)

        return run

    def _note(self, *inputs: Any) -> Any:
        self.inputs = inputs
        self.outputs = self.artifact(*inputs)
        return self.outputs

    def _refuse(self, *_: Any) -> Any:
        raise _Compiled


@dataclass
class _Kept:
    compiler: _Keeping
    result: Any

    @property
    def artifact(self) -> Any:
        return self.compiler.artifact

    def forget(self) -> None:
        """Let go of the tensors of the first run."""
        self.compiler.inputs = self.compiler.outputs = ()
        self.result = None

    def layout(self, function: Callable[..., Any], examples: Sequence[Input]) -> dict[str, Any]:
        """Whose tensors the graph takes, and what becomes of those it makes, by their identity.

        Raises:
            ValueError: one is nobody's that a later process could know.
        """
        given, made, state = self.compiler.inputs, self.compiler.outputs, State(function)
        if self.compiler.has_constants:
            raise ValueError("tensors are constants of the graph: make them inputs, or buffers")
        known = {id(tensor): ["state", i] for i, tensor in enumerate(state.now())}
        known |= {id(x): ["input", i] for i, x in enumerate(examples) if isinstance(x, Tensor)}
        if strange := [i for i, tensor in enumerate(given) if id(tensor) not in known]:
            raise ValueError(
                f"{len(strange)} tensors are neither inputs, parameters nor buffers: make them so"
            )
        leaves, spec = pytree.tree_flatten(self.result)
        places = {id(tensor): ["made", i] for i, tensor in enumerate(made)}
        return {
            "takes": [known[id(tensor)] for tensor in given],
            "leaves": [(known | places).get(id(leaf)) or _constant(leaf) for leaf in leaves],
            "spec": pytree.treespec_dumps(spec),
            "tensors": [i for i, value in enumerate(examples) if isinstance(value, Tensor)],
            "state": state.layout(),
        }


def _capture(
    function: Callable[..., Any],
    examples: Sequence[Input],
    name: str,
    warm_runs: int,
    options: Mapping[str, Any],
) -> tuple[Frozen, _Kept]:
    own, compiler = alone(function, name), _Keeping(options)
    compiled = _compile_once(own, compiler, None, None)
    with without_records():
        result = compiled(*examples)
    direct = direct_path(own, examples)
    for _ in range(warm_runs - 1):
        compiled(*examples)
    return Frozen(compiled, stale=_why_stale, direct=direct), _Kept(compiler, result)


def _load(folder: Path, function: Callable[..., Any]) -> Callable[..., Any]:
    layout = json.loads((folder / _LAYOUT).read_bytes())
    state = State(function)
    if layout["state"] != state.layout():
        raise ValueError("its parameters and buffers are others")
    inductor: Any = torch._inductor
    with _known_processor(), _no_headers():
        graph = inductor.CompiledArtifact.load(path=str(folder / _GRAPH), format="binary")
    takes = [(kind == "state", i) for kind, i in layout["takes"]]
    leaves, spec = layout["leaves"], pytree.treespec_loads(layout["spec"])
    is_one_tensor = leaves == [["made", 0]] and spec.is_leaf()
    apart = Apart(function, layout["tensors"])

    def run(*inputs: Input) -> Any:
        if shared := apart.mismatch(inputs):
            raise StateChanged(f"{shared}, captured apart")
        own = state.now()
        made = graph(*[own[i] if is_own else inputs[i] for is_own, i in takes])
        if is_one_tensor:
            return made[0]
        return pytree.tree_unflatten(_results(leaves, made, inputs, own), spec)

    return run


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


def _results(
    leaves: Sequence[Any], made: Sequence[Any], inputs: Sequence[Any], own: Sequence[Any]
) -> Iterator[Any]:
    sources = {"made": made, "input": inputs, "state": own}
    for kind, value in leaves:
        yield value if kind == "constant" else sources[kind][value]


def _constant(leaf: Any) -> list[Any]:
    if not isinstance(leaf, _CONSTANTS):
        raise ValueError(f"returns a {type(leaf).__name__}; expected tensors and constants")
    return ["constant", leaf]


def _values_of(part: Any) -> Iterator[Any]:
    yield from part.__dict__.values()
    yield from part._parameters.values()
    yield from part._buffers.values()


def _why_loaded_is_stale(error: Exception) -> str | None:
    return str(error) if isinstance(error, StateChanged) else None
