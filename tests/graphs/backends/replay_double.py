"""A fake recorder of CUDA graphs on a CPU: replays use addresses only, as on the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphs.backends.recorded import Recorder, Recording


class Moved(AssertionError):
    """A tensor that was recorded lies elsewhere by now."""


class ReplayDouble(Recorder):
    """Records calls; a replay runs them on the same tensors, and overwrites the same outputs.

    All recordings write their outputs to one pool, from its start, as graphs that share memory may.

    Args:
        watched: what the callable writes besides its inputs; as on a device, recording changes
            nothing.
        device: where all of it lies.
    """

    def __init__(self, watched: tuple[Tensor, ...] = (), device: str = "cpu") -> None:
        self.watched, self.device = watched, device
        self.pool = torch.zeros(1 << 16, dtype=torch.uint8, device=device)
        self.warm_runs = self.replays = self.closed = 0

    def on(self, device: torch.device) -> AbstractContextManager[object]:
        return nullcontext()

    def recording(self) -> AbstractContextManager[Any]:
        raise NotImplementedError("it records whole calls only")

    def warm(self, call: Callable[[], Any], runs: int) -> None:
        for _ in range(runs):
            call()
        self.warm_runs += runs

    def record(self, call: Callable[[], Any]) -> Recording:
        inputs = [cell.cell_contents for cell in call.__closure__ or ()]
        fixed = [*pytree.tree_leaves(inputs), *self.watched]
        fixed = [tensor for tensor in fixed if isinstance(tensor, Tensor)]
        before = [tensor.clone() for tensor in fixed]
        outputs, spec = pytree.tree_flatten(call())
        own = {id(tensor) for tensor in fixed}
        pooled = [
            out if id(out) in own else self._pooled(outputs, i) for i, out in enumerate(outputs)
        ]
        for tensor, content in zip(fixed, before, strict=True):
            tensor.copy_(content)
        addresses = [tensor.data_ptr() for tensor in fixed]

        def replay() -> None:
            if [tensor.data_ptr() for tensor in fixed] != addresses:
                raise Moved
            for place, value in zip(pooled, pytree.tree_leaves(call()), strict=True):
                if isinstance(value, Tensor) and value is not place:
                    place.copy_(value)
            self.replays += 1

        def close() -> None:
            self.closed += 1

        return Recording(replay, pytree.tree_unflatten(pooled, spec), close)

    def _pooled(self, outputs: list[Any], index: int) -> Any:
        if not isinstance(outputs[index], Tensor):
            return outputs[index]
        sizes = [(o.nbytes + 63) // 64 * 64 if isinstance(o, Tensor) else 0 for o in outputs]
        start, out = sum(sizes[:index]), outputs[index]
        return self.pool[start : start + out.nbytes].view(out.dtype).view(out.shape)
