"""Backends that each break one guarantee; all others they keep, as eager code does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from graphs.backends.eager import EagerBackend
from graphs.capture.contract import Backend, Frozen, Job
from graphs.errors import CaptureError

__all__ = ["BROKEN"]


class Broken(EagerBackend):
    """Runs the callable, wrapped in something that is wrong."""

    def capture(self, job: Job) -> Frozen:
        return replace(super().capture(job), run=self.wrong(job, job.function))

    def wrong(self, job: Job, run: Callable[..., Any]) -> Callable[..., Any]:
        raise NotImplementedError


class StaleConstant(Broken):
    """Numbers in attributes are those of the capture."""

    name = "stale constant"

    def wrong(self, job, run):
        if not isinstance(job.function, nn.Module):
            return run
        attributes = vars(job.function)
        then = {key: value for key, value in attributes.items() if isinstance(value, float)}

        def stale(*inputs):
            now = {key: attributes[key] for key in then}
            attributes.update(then)
            try:
                return run(*inputs)
            finally:
                attributes.update(now)

        return stale


class AliasingLost(Broken):
    """Each input is copied, and copied back: as if no two shared memory."""

    name = "aliasing lost"

    def wrong(self, job, run):
        def apart(*inputs):
            copies = pytree.tree_map_only(Tensor, torch.clone, inputs)
            outputs = run(*copies)
            own = {id(copy): given for copy, given in zip(copies, inputs, strict=True)}
            for given, copy in zip(inputs, copies, strict=True):
                if isinstance(given, Tensor) and not torch.equal(given, copy):
                    given.copy_(copy)
            return pytree.tree_map(lambda leaf: own.get(id(leaf), leaf), outputs)

        return apart


class WritesLost(Broken):
    """Inputs are copied, and not copied back."""

    name = "writes lost"

    def wrong(self, job, run):
        return lambda *inputs: run(*pytree.tree_map_only(Tensor, torch.clone, inputs))


class WrongLayout(Broken):
    """Outputs are contiguous."""

    name = "wrong layout"

    def wrong(self, job, run):
        return lambda *inputs: pytree.tree_map_only(
            Tensor, lambda out: out if _is_of(out, inputs) else out.contiguous(), run(*inputs)
        )


class ReusedTooEarly(Broken):
    """Outputs lie in one of two buffers in turn, though they are to last."""

    name = "memory reused too early"

    def wrong(self, job, run):
        buffers, runs = [{}, {}], [0]

        def reusing(*inputs):
            runs[0] += 1
            return _moved_to(buffers[runs[0] % 2], inputs, run(*inputs))

        return reusing


class ViewReturned(Broken):
    """An output of the shape of an input is a view of that input's memory."""

    name = "view returned"

    def wrong(self, job, run):
        def viewing(*inputs):
            def view(out):
                for given in inputs:
                    same = isinstance(given, Tensor) and given.shape == out.shape
                    if same and given.dtype == out.dtype and given.is_contiguous():
                        return given.view(given.shape).copy_(out)
                return out

            return pytree.tree_map_only(Tensor, view, run(*inputs))

        return viewing


class ErrorSwallowed(EagerBackend):
    """A capture that fails is a graph that returns nothing."""

    name = "error swallowed"

    def capture(self, job):
        try:
            return super().capture(job)
        except CaptureError:
            return Frozen(lambda *inputs: None)


class StaleInputs(Broken):
    """Each run computes with the inputs that were first given at an address."""

    name = "replay with stale inputs"

    def wrong(self, job, run):
        before = {}

        def stale(*inputs):
            tensors = [value for value in inputs if isinstance(value, Tensor)]
            key = tuple(tensor.data_ptr() for tensor in tensors[:1])
            copies = pytree.tree_map_only(Tensor, torch.clone, inputs)
            return run(*before.setdefault(key, copies))

        return stale


class WrongDevice(Broken):
    """Outputs are elsewhere."""

    name = "wrong device"

    def wrong(self, job, run):
        return lambda *inputs: pytree.tree_map_only(
            Tensor, lambda out: out if _is_of(out, inputs) else out.to("meta"), run(*inputs)
        )


class UnlimitedGrowth(Broken):
    """Each run leaves something behind."""

    name = "unlimited growth"

    def wrong(self, job, run):
        left = []

        def growing(*inputs):
            left.append(pytree.tree_map_only(Tensor, torch.clone, inputs))
            return run(*inputs)

        return growing


class TooFew(EagerBackend):
    """There are eight graphs of a callable at most."""

    name = "a limit on the number of graphs"

    def __init__(self):
        self._counts = {}

    def capture(self, job):
        count = self._counts[job.function] = self._counts.get(job.function, 0) + 1
        if count > 8:
            raise CaptureError(job.name, "recompile limit reached")
        return super().capture(job)


class NeverFreed(EagerBackend):
    """What was captured lives as long as the backend."""

    name = "closed and not freed"

    def __init__(self):
        self._held = []

    def capture(self, job):
        self._held.append(job.function)
        return super().capture(job)


class StaleWeights(Broken):
    """Parameters are those of the capture."""

    name = "stale weights"

    def wrong(self, job, run):
        if not isinstance(job.function, nn.Module):
            return run
        then = {name: value.clone() for name, value in job.function.named_parameters()}
        return lambda *inputs: torch.func.functional_call(job.function, then, inputs)


class StructureLost(Broken):
    """Outputs come as a flat tuple."""

    name = "structure lost"

    def wrong(self, job, run):
        def flat(*inputs):
            leaves, spec = pytree.tree_flatten(run(*inputs))
            return leaves[0] if spec.is_leaf() else tuple(leaves)

        return flat


BROKEN: dict[type[Backend], set[str]] = {
    StaleConstant: {"attributes"},
    AliasingLost: {"inputs_that_share_memory", "inputs_that_newly_share_memory"},
    WritesLost: {"writes_to_inputs"},
    WrongLayout: {"layouts_of_outputs"},
    ReusedTooEarly: {"outputs_last"},
    ViewReturned: {"inputs_stay"},
    ErrorSwallowed: {"failures"},
    StaleInputs: {"inputs_are_read_anew"},
    WrongDevice: {"values"},
    UnlimitedGrowth: {"memory_of_runs"},
    TooFew: {"many_graphs"},
    NeverFreed: {"memory_of_closed"},
    StaleWeights: {"weights"},
    StructureLost: {"structures"},
}
"""Each with cases that have to find it."""


def _is_of(out: Tensor, inputs: Any) -> bool:
    return any(out is given for given in inputs)


def _moved_to(buffers: dict[int, Tensor], inputs: Any, outputs: Any) -> Any:
    leaves, spec = pytree.tree_flatten(outputs)
    for at, out in enumerate(leaves):
        if isinstance(out, Tensor) and not _is_of(out, inputs):
            leaves[at] = buffers.setdefault(at, torch.empty_strided(out.shape, out.stride()))
            leaves[at].copy_(out)
    return pytree.tree_unflatten(leaves, spec)
