"""Backend `inductor` with a store: a later process loads what one has compiled.

Inductor's own cache alone does not give a second start in seconds, as Dynamo still traces every
bucket. So the whole compiled graph is stored, with the source of each of its inputs: loading it
neither traces nor compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from graphs.backends.inductor import InductorBackend, freeze, shareable
from graphs.capture.contract import Frozen, Job
from graphs.capture.inputs import Input, memory_shared_by
from graphs.capture.symbolic import SymbolicSizes
from graphs.errors import CaptureError
from graphs.store.store import ArtifactStore
from graphs.store.stored import Make, StoredBackend
from graphs.torch_internals.artifacts import ArtifactCompiler, can_store, read
from graphs.torch_internals.headers import compile_headers
from graphs.torch_internals.settings import has_cudagraphs

__all__ = ["StoredInductor"]


class StoredInductor(StoredBackend, InductorBackend):
    """Backend `inductor` with a store: loads a graph that was stored, else compiles and stores it.

    A loaded graph has no guards of Dynamo. The key of the store, the checks of
    :class:`~graphs.CapturedGraph` and :class:`~graphs.capture.module_state.ModuleState` replace
    them. Like backend `aoti`, it does not notice a global that changes *after* it was loaded.

    Args:
        store: holds the graphs.
        seal: called after each capture, also of a loaded graph, which may compile kernels; meant
            for :meth:`InductorCache.seal`.

    Attributes: see :class:`~graphs.store.stored.StoredBackend`.
    """

    def __init__(self, store: ArtifactStore, seal: Callable[[], object] | None = None) -> None:
        InductorBackend.__init__(self)
        StoredBackend.__init__(self, store, read)
        self._seal = seal or (lambda: None)

    def available(self) -> str | None:
        """Needs what backend `inductor` needs, and a torch that can store compiled graphs."""
        if not can_store():
            return "this torch cannot store compiled graphs: give backend='inductor'"
        return super().available()

    def capture(self, job: Job) -> Frozen:
        """Load the graph, or compile it in the first run and store it."""
        frozen = super().capture(job)
        self._seal()  # in another environment a loaded graph compiles its kernels too
        return frozen

    def alone(self, job: Job) -> Frozen:
        """A graph of fixed sizes."""
        factors = self.factors(job)
        if isinstance(factors, str):
            self.warn_not_stored(job.graph_name, factors)
            return super().alone(job)
        return self.load_or_store(job, factors, _maker(job))

    def shared(self, job: Job) -> Frozen:
        """A graph of symbolic sizes.

        Where guards on the sizes need several graphs, the store numbers them; the first one whose
        guards hold for the examples is loaded.
        """
        factors = self.factors(job)
        if isinstance(factors, str):
            self.warn_not_stored(job.graph_name, factors)
            return super().shared(job)
        part = {"part": 0}
        while graph := self.find(job, factors | part):
            if not graph.why_not(job.examples):
                if not self.runs(graph, job):
                    break
                # Without the examples and the shared sizes, which hold this graph.
                sizes = SymbolicSizes(job.graph_name, job.dims)
                like = replace(job, examples=()).with_spec(sizes=sizes)
                return replace(graph, why_not=partial(self._why_not, graph, like, factors))
            part = {"part": part["part"] + 1}
        return shareable(self.capture_and_store(job, factors | part, _maker(job)))

    def has(self, job: Job) -> bool:
        """Whether the store has the graph; does not check its files."""
        factors = self.factors(job)
        if isinstance(factors, str):
            return False
        return self.store.has(factors | {"part": 0} if job.spec.sizes else factors)

    def factors(self, job: Job) -> dict[str, Any] | str:
        """Everything that a graph depends on, or why it cannot be stored."""
        if (mode := job.options["mode"]) is not None:
            return f"mode={mode!r} is resolved by torch.compile itself: give options instead"
        if (job.options["options"] or {}).get("triton.cudagraphs", has_cudagraphs()):
            return "inductor's own CUDA graphs cannot be stored: use backend 'cudagraph'"
        if torch.is_grad_enabled():
            return "grad mode is enabled: capture under torch.no_grad()"
        if shared := memory_shared_by(job.function, job.examples):
            return f"{shared}: give each memory of its own"
        return super().factors(job)

    def _why_not(
        self, graph: Frozen, job: Job, factors: Mapping[str, Any], examples: Sequence[Input]
    ) -> str:
        if self.factors(replace(job, examples=examples)) != factors:
            return "its inputs or other factors differ from those of the stored graph"
        return graph.why_not(examples)


def _maker(job: Job) -> Make:
    # Where inductor cannot make a graph that can be stored, it makes another one; writing that one
    # then raises the reason.

    def make(folder: Path) -> tuple[Frozen, Callable[[], object]]:
        compiler = ArtifactCompiler(job)
        tensors = (value for value in job.examples if isinstance(value, torch.Tensor))
        if all(tensor.device.type == "cpu" for tensor in tensors):
            compile_headers()
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
