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

from graphs.backends.inductor import InductorBackend, compile_only, freeze, shareable
from graphs.capture.contract import Frozen, Job
from graphs.capture.inputs import Input, memory_shared_by
from graphs.capture.symbolic import SymbolicSizes
from graphs.errors import CaptureError
from graphs.store.store import ArtifactStore
from graphs.store.stored import Make, StoredBackend
from graphs.torch_internals.artifacts import ArtifactCompiler, can_store, read
from graphs.torch_internals.example_inputs import separate_storages
from graphs.torch_internals.settings import has_cudagraphs

__all__ = ["StoredInductor"]


class StoredInductor(StoredBackend, InductorBackend):
    """Captures as backend `inductor` does, but loads what the store has, and stores what it lacks.

    A loaded graph has no guards of Dynamo: its store's key, the checks of a
    :class:`~graphs.CapturedGraph` and a :class:`~graphs.capture.module_state.ModuleState` take
    their place. A global that changes *after* the graph was loaded goes unnoticed, as with backend
    `aoti`; one that changed before does not.

    Args:
        store: where graphs are.
        seal: called after each capture, as a loaded graph may have compiled its kernels; for
            :meth:`InductorCache.seal`.

    Attributes: see :class:`~graphs.store.stored.StoredBackend`.
    """

    def __init__(self, store: ArtifactStore, seal: Callable[[], object] | None = None) -> None:
        InductorBackend.__init__(self)
        StoredBackend.__init__(self, store, read)
        self._seal = seal or (lambda: None)

    def available(self) -> str | None:
        """Needs what backend `inductor` needs, and a torch that can store what it compiled."""
        if not can_store():
            return "this torch cannot store what it compiled: use backend 'inductor' by its name"
        return super().available()

    def capture(self, job: Job) -> Frozen:
        """Load the graph, or compile it in the first run and store it."""
        frozen = super().capture(job)
        self._seal()  # also of one that was loaded: another environment compiles its kernels then
        return frozen

    def alone(self, job: Job) -> Frozen:
        """A graph of fixed sizes."""
        factors = self.factors(job)
        if isinstance(factors, str):
            self.not_stored(job.graph_name, factors)
            return super().alone(job)
        return self.load_or_store(job, factors, _making(job))

    def shared(self, job: Job) -> Frozen:
        """A graph in which symbols stand for sizes of the inputs.

        The store has one for all of their sizes, or where their guards need several, one after the
        other: the first that runs on the examples is loaded.
        """
        factors = self.factors(job)
        if isinstance(factors, str):
            self.not_stored(job.graph_name, factors)
            return super().shared(job)
        part = {"part": 0}
        while graph := self.found(job, factors | part):
            if not graph.why_not(job.examples):
                if not self.runs(graph, job):
                    break
                # Without the examples, nor what is shared, which holds this graph.
                sizes = SymbolicSizes(job.graph_name, job.dims)
                like = replace(job, examples=()).with_spec(sizes=sizes)
                return replace(graph, why_not=partial(self._why_not, graph, like, factors))
            part = {"part": part["part"] + 1}
        return shareable(self.store_made(job, factors | part, _making(job)))

    def has(self, job: Job) -> bool:
        """Whether a capture would find the graph, if it is not damaged."""
        factors = self.factors(job)
        if isinstance(factors, str):
            return False
        return self.store.has(factors | {"part": 0} if job.spec.sizes else factors)

    def precompile(self, job: Job) -> None:
        """Compile what the store lacks into inductor's cache on disk; runs and stores nothing."""
        if job.options["mode"] is not None:
            super().precompile(job)
        elif not self.has(job):
            job = replace(job, examples=separate_storages(job.examples))
            compile_only(job, ArtifactCompiler(job))

    def factors(self, job: Job) -> dict[str, Any] | str:
        """Everything that a graph depends on, or why it cannot be stored."""
        if (mode := job.options["mode"]) is not None:
            return f"mode={mode!r} is resolved by torch.compile itself: give options instead"
        if (job.options["options"] or {}).get("triton.cudagraphs", has_cudagraphs()):
            return "inductor's own CUDA graphs cannot be kept: take backend 'cudagraph'"
        if torch.is_grad_enabled():
            return "grad mode is enabled: capture under torch.no_grad()"
        if shared := memory_shared_by(job.function, job.examples):
            return f"{shared}: give each memory of its own"
        return super().factors(job)

    def _why_not(
        self, graph: Frozen, job: Job, factors: Mapping[str, Any], examples: Sequence[Input]
    ) -> str:
        """Why a loaded graph cannot run on inputs: no guard of Dynamo's is there to say it."""
        if self.factors(replace(job, examples=examples)) != factors:
            return (
                "its inputs, or what else it depends on, are others than those of the stored graph"
            )
        return graph.why_not(examples)


def _making(job: Job) -> Make:
    """What captures a graph, and returns also what writes it into a folder.

    Where inductor cannot make one that can be kept, it is one that cannot; writing it says why.
    """

    def make(folder: Path) -> tuple[Frozen, Callable[[], object]]:
        compiler = ArtifactCompiler(job)
        try:
            frozen, result = freeze(
                job.with_spec(options={**job.options, "options": None}), compiler
            )
        except CaptureError:
            if compiler.failure is None:
                raise
            frozen, result = freeze(job, "inductor")
        return frozen, lambda: compiler.write(folder, job, result)

    return make
