"""The checks of a step: values, neighbours, inputs, written memory, replay."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from compiled_attn.testing.kit.replay import same_buffers
from compiled_attn.testing.kit.scene import Scene
from compiled_attn.testing.kit.settings import changed, settings, unchanged
from compiled_attn.testing.kit.step import Step
from compiled_attn.testing.kit.tensors import bits, tensors_in
from compiled_attn.testing.kit.trial import Call, Measured, Mismatch, Trial, raised, restore
from graphs.capture.contract import Backend

__all__ = ["Check", "again", "inputs", "neighbours", "replay", "state", "values", "written"]

Check = Callable[[Trial, Step], Measured]
"""Checks a step; raises `Mismatch`."""


def values(trial: Trial, step: Step) -> Measured:
    """Output and lse match the reference; padding rows are finite."""
    call = trial.call(step)
    want, allowed = trial.want(call)
    return trial.compare(call, trial.run(call), want, allowed)


def state(trial: Trial, step: Step) -> Measured:
    """Torch's global settings and default generators are the same after a call."""
    call, found = trial.call(step), None
    with torch.no_grad(), unchanged(trial.device):
        before = settings(trial.device)
        with contextlib.suppress(Exception, SystemExit):  # of which other cases are
            trial.op(*call.args, **call.kwargs)
        found = changed(before, settings(trial.device))
    if found is not None:
        raise Mismatch(found)
    return Measured()


def neighbours(trial: Trial, step: Step) -> Measured:
    """A request's output has the same bits when all others are filled with NaN."""
    note = ""
    call = trial.call(step)
    before, again = (trial.run(each)[0].clone() for each in (call, trial.call(step)))
    for request in range(len(step.requests)):
        mine = [*call.scene.rows_of(request)]

        def poison(
            scene: Scene, fields: SimpleNamespace, request: int = request, mine: list[int] = mine
        ) -> None:
            poison_others(scene, fields, request, mine)

        got = trial.run(trial.call(step, poison))[0]
        if not torch.equal(before[mine], again[mine]):  # bits cannot be compared
            note = "not deterministic: equal calls differ in their bits, so checked for NaN only"
            same = bool(got[mine].isfinite().all())
        else:
            same = torch.equal(got[mine], before[mine])
        if not same:
            changed = "nan" if bool(got[mine].isnan().any()) else "different"
            raise Mismatch(
                f"the output of request {request} becomes {changed} when queries, keys and values "
                "of the other requests become nan"
            )
    return Measured(note=note)


def poison_others(scene: Scene, s: SimpleNamespace, request: int, mine: list[int]) -> None:
    """Fills query rows, new tokens and slots of the other requests with NaN."""
    rows = [row for row in range(len(s.query)) if row not in mine]
    s.query[rows] = math.nan
    for new in (s.key, s.value):
        if new is not None:
            new[rows] = math.nan
    own = {*scene.owned[request]}
    for other, slots in enumerate(scene.owned):
        for block, slot in slots if other != request else []:
            if (block, slot) in own:
                continue
            for cache, scale in ((s.key_cache, s.key_scale), (s.value_cache, s.value_scale)):
                if cache is not None and cache.dtype != torch.int8:
                    cache[block, slot] = math.nan
                if cache is not None and scale is not None:
                    scale[block, slot] = math.nan


def inputs(trial: Trial, step: Step) -> Measured:
    """A call that appends nothing writes to its outputs only."""
    call = trial.call(step)
    read = call.args[trial.interface.outputs :], call.kwargs
    before = bits(read)
    trial.run(call)
    _expect_same(call, before, bits(read), read, "expected no writes")
    return Measured()


def written(trial: Trial, step: Step) -> Measured:
    """New keys and values are stored bit for bit and attended to; nothing else is written."""
    call = trial.call(step)
    want, allowed = trial.want(call)
    read = call.args[trial.interface.outputs :], call.kwargs
    saved = bits(read)
    trial.expected(call)
    _clear_null_block(call)
    right = bits(read)
    rotated = call.fields.key_cache.clone() if step.rotary else None
    restore(saved, read)
    got = trial.run(call)
    measured = trial.compare(call, got, want, allowed)
    _clear_null_block(call)
    if rotated is not None:  # rounding may differ, so not bit for bit
        _expect_close(call, rotated)
        call.fields.key_cache.copy_(rotated)
    _expect_same(call, right, bits(read), read, "expected other bits after the call")
    return measured


def replay(trial: Trial, step: Step, backend: Backend | None = None) -> Measured:
    """A captured call is right again after the metadata in its buffers changed."""
    return _twice(trial, step, lambda call: same_buffers(trial, call, backend))


def again(trial: Trial, step: Step) -> Measured:
    """A second call in the same buffers is right after the metadata in them changed."""

    def called(call: Call) -> tuple[Callable[[], Any], str]:
        return torch.no_grad()(lambda: trial.op(*call.args, **call.kwargs)), "called"

    return _twice(trial, step, called)._replace(note="")


def _twice(
    trial: Trial, step: Step, captured: Callable[[Call], tuple[Callable[[], Any], str]]
) -> Measured:
    first, other = trial.call(step), trial.call(step.changed())
    saved, changes = bits(first.inputs), [each.clone() for each in tensors_in(other.inputs)]
    (want, allowed), (new_want, new_allowed) = trial.want(first), trial.want(other)
    with unchanged(trial.device):
        run, note = captured(first)
    restore(saved, first.inputs)
    measured = trial.compare(first, _replayed(trial, run, first), want, allowed)
    for tensor, new in zip(tensors_in(first.inputs), changes, strict=True):
        if tensor.shape != new.shape:
            raise Mismatch(f"replay: expected equal shapes, got {tensor.shape} and {new.shape}")
        tensor.copy_(new)
    try:
        changed = first._replace(scene=other.scene)
        got = _replayed(trial, run, changed)
        measured = measured.or_worse(trial.compare(changed, got, new_want, new_allowed))
    except Mismatch as error:
        how = "replayed" if not note else "called again"
        raise Mismatch(f"{how} with other metadata in the same buffers: {error}") from error
    return measured._replace(note=note)


def _replayed(trial: Trial, run: Callable[[], Any], call: Call) -> tuple[Tensor, Tensor | None]:
    try:
        with unchanged(trial.device):
            returned = run()
    except (Exception, SystemExit) as error:
        raise Mismatch(raised(error)) from error
    return trial.results(returned, call)


def _clear_null_block(call: Call) -> None:
    """Clears the null block, where padding may write anything."""
    s = call.fields
    if call.scene.tokens > len(call.scene.real):
        for each in (s.key_cache, s.value_cache, s.key_scale, s.value_scale):
            if each is not None:
                each[0].zero_()


def _expect_close(call: Call, want: Tensor) -> None:
    got, step = call.fields.key_cache, call.scene.step
    new = [slots[len(slots) - rows :] for slots, (rows, _) in
           zip(call.scene.owned, call.scene.sizes, strict=True)]  # fmt: skip
    allowed = 4 * torch.finfo(step.dtype).eps * float(want.nan_to_num(0).abs().clamp_max(9).max())
    for block, slot in (each for slots in new for each in slots):
        error = (got[block, slot].double() - want[block, slot].double()).abs().max().item()
        if not error <= allowed:
            raise Mismatch(
                f"key_cache[{block}, {slot}]: expected the rotated key, got an error of "
                f"{error:.3g}, allowed {allowed:.3g}"
            )
        got[block, slot] = want[block, slot]


def _expect_same(call: Call, want: list[Tensor], got: list[Tensor], read: Any, what: str) -> None:
    for old, new, (name, tensor) in zip(want, got, _storages(call, read), strict=True):
        wrong = (old != new).nonzero()
        if len(wrong):
            byte = int(wrong[0, 0])
            raise Mismatch(
                f"{name}: {what}: {len(wrong)} bytes differ, the first in element "
                f"{byte // tensor.element_size()} of its memory ({tensor.dtype})"
            )


def _storages(call: Call, read: Any) -> list[tuple[str, Tensor]]:
    """Names and tensors in the order of `bits`."""
    names = {
        value.untyped_storage().data_ptr(): name
        for name, value in vars(call.fields).items()
        if isinstance(value, Tensor)
    }
    found: dict[int, tuple[str, Tensor]] = {}
    for each in tensors_in(read):
        at = each.untyped_storage().data_ptr()
        found[at] = names.get(at, "an argument"), each
    return [*found.values()]
