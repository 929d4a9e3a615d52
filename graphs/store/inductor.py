"""Backend `inductor` with a store: a later process loads what one has compiled.

Persisting inductor's own cache is not enough for a second start in seconds: Dynamo still traces
every bucket. Here the graph that inductor compiled is kept whole, with a note of which of its
inputs are whose, so that loading it traces nothing and compiles nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from graphs.backends.dynamo_inputs import separated
from graphs.backends.inductor import InductorBackend, compile_only, freeze, shareable
from graphs.capture.contract import Frozen
from graphs.capture.inputs import Input, memory_shared_by
from graphs.capture.symbolic import SharedGraph, SymbolicSizes
from graphs.errors import CaptureError
from graphs.store.inductor_graph import Keeping, read, read_shared
from graphs.store.store import ArtifactStore
from graphs.store.stored import StoredBackend

__all__ = ["StoredInductor"]


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
        self, function: Callable[..., Any], example_inputs: Sequence[Input], **settings: Any
    ) -> Frozen:
        """Load the graph, or compile it in the first run and store it."""
        frozen = super().capture(function, example_inputs, **settings)
        self._seal()  # also of one that was loaded: another environment compiles its kernels then
        return frozen

    def alone(
        self, function: Callable[..., Any], example_inputs: Sequence[Input], **how: Any
    ) -> Frozen:
        """A graph of fixed sizes; `how` are the arguments of `capture`."""
        name, options, runs = how["name"], how["options"], how["warm_runs"]
        factors = self._factors(function, example_inputs, how["mode"], options)
        if isinstance(factors, str):
            self.not_stored(name, factors)
            return super().alone(function, example_inputs, **how)
        make = _making(function, example_inputs, (), name, runs, options)
        return self.load_or_store(
            factors, function, example_inputs, make, name=name, warm_runs=runs
        )

    def shared(
        self,
        function: Callable[..., Any],
        example_inputs: Sequence[Input],
        symbolic: SymbolicSizes,
        **how: Any,
    ) -> tuple[SharedGraph, Frozen]:
        """A graph in which symbols stand for sizes of the inputs, and it for the examples.

        The store has one for all of their sizes, or where their guards need several, one after the
        other: the first that runs on the examples is loaded.
        """
        mode, options, runs = how["mode"], how["options"], how["warm_runs"]
        factors = self._factors(function, example_inputs, mode, options, symbolic.dims)
        if isinstance(factors, str):
            self.not_stored(symbolic.name, factors)
            return super().shared(function, example_inputs, symbolic, **how)
        part, read_part = {"part": 0}, partial(read_shared, function=function)
        while graph := self.found(factors | part, symbolic.name, read_part):
            if not graph.why_not(example_inputs):
                own = graph.at(example_inputs)
                if not self.runs(own, example_inputs, how["name"], runs):
                    break
                factors_of = partial(
                    self._factors, function, mode=mode, options=options, dims=symbolic.dims
                )
                return replace(graph, why_not=partial(_why_not, graph, factors_of, factors)), own
            part = {"part": part["part"] + 1}
        make = _making(function, example_inputs, symbolic.dims, how["name"], runs, options)
        return shareable(self.store_made(factors | part, function, make, symbolic.name))

    def has(
        self,
        function: Callable[..., Any],
        example_inputs: Sequence[Input],
        *,
        symbolic: SymbolicSizes | None = None,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> bool:
        """Whether a capture would find the graph, if it is not damaged."""
        dims = symbolic.dims if symbolic else ()
        factors = self._factors(function, example_inputs, mode, options, dims)
        if symbolic and not isinstance(factors, str):
            factors |= {"part": 0}
        return not isinstance(factors, str) and self.store.has(factors)

    def precompile(
        self,
        function: Callable[..., Any],
        example_inputs: Sequence[Input],
        *,
        name: str,
        symbolic: SymbolicSizes | None = None,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Compile what the store lacks into inductor's cache on disk; runs and stores nothing."""
        own: dict[str, Any] = {"symbolic": symbolic, "options": options}
        dims = symbolic.dims if symbolic else ()
        if mode is not None:
            super().precompile(function, example_inputs, name=name, mode=mode, **own)
        elif not self.has(function, example_inputs, **own):
            compiler = Keeping(options or {}, bool(dims))
            compile_only(function, separated(example_inputs), compiler, name=name, dims=dims)

    def read(self, folder: Path, function: Callable[..., Any]) -> Callable[..., Any]:
        """Load the graph; nothing is traced or compiled.

        Raises:
            ValueError: the parameters and buffers of `function` are not those it was compiled for.
        """
        return read(folder, function)

    def _factors(
        self,
        function: Callable[..., Any],
        examples: Sequence[Input],
        mode: str | None,
        options: Mapping[str, Any] | None,
        dims: Sequence[Sequence[int]] = (),
    ) -> dict[str, Any] | str:
        if mode is not None:
            return f"mode={mode!r} is resolved by torch.compile itself: give options instead"
        if (options or {}).get("triton.cudagraphs", torch._inductor.config.triton.cudagraphs):
            return "inductor's own CUDA graphs cannot be kept: take backend 'cudagraph'"
        if torch.is_grad_enabled():
            return "grad mode is enabled: capture under torch.no_grad()"
        if shared := memory_shared_by(function, examples):
            return f"{shared}: give each memory of its own"
        return self.factors(function, examples, options, dims)


def _why_not(
    graph: SharedGraph,
    factors_of: Callable[[Sequence[Input]], Any],
    factors: Mapping[str, Any],
    examples: Sequence[Input],
) -> str:
    """Why a graph that was loaded cannot run on inputs: no guard of Dynamo's is there to say it."""
    if factors_of(examples) != factors:
        return "its inputs, or what else it depends on, are others than those of the stored graph"
    return graph.why_not(examples)


def _making(
    function: Callable[..., Any],
    examples: Sequence[Input],
    dims: Sequence[Sequence[int]],
    name: str,
    warm_runs: int,
    options: Mapping[str, Any] | None,
) -> Callable[[Path], tuple[Frozen, Callable[[], object]]]:
    """What captures a graph, and returns also what writes it into a folder.

    Where inductor cannot make one that can be kept, it is one that cannot; writing it says why.
    """

    def make(folder: Path) -> tuple[Frozen, Callable[[], object]]:
        compiler = Keeping(options or {}, bool(dims))
        how: dict[str, Any] = {"name": name, "warm_runs": warm_runs, "dims": dims}
        try:
            frozen, result = freeze(function, examples, compiler, **how)
        except CaptureError:
            if compiler.failure is None:
                raise
            how["options"] = options and dict(options)
            return freeze(function, examples, "inductor", **how)[0], partial(_fail, compiler)
        return frozen, lambda: compiler.write(folder, function, examples, result)

    return make


def _fail(compiler: Keeping) -> None:
    assert compiler.failure is not None
    raise compiler.failure
