"""A recorder on a CPU that keeps the operators that torch dispatches, and replays only these."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphs.backends.recorded import Recorder


class Tape(TorchDispatchMode):
    """Operators with their tensors; as on a device, recording changes no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Any]]] = []
        self.resets = 0
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in _tensors((args, kwargs)):
            flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            self._before.setdefault(flat.data_ptr(), (flat, flat.clone()))
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, _tensors(result)))
        return result

    def restore(self) -> None:
        for place, content in self._before.values():
            place.copy_(content)
        self._before.clear()

    def replay(self) -> None:
        for func, args, kwargs, places in self.calls:
            for place, made in zip(places, _tensors(func(*args, **kwargs)), strict=True):
                if place.untyped_storage().data_ptr() != made.untyped_storage().data_ptr():
                    place.copy_(made)

    def reset(self) -> None:
        self.calls.clear()
        self.resets += 1


class DispatchDouble(Recorder):
    """Records what torch dispatches."""

    device = "cpu"

    def __init__(self) -> None:
        self.tapes: list[Tape] = []

    def on(self, device: torch.device) -> AbstractContextManager[object]:
        return nullcontext()

    def warm(self, call, runs) -> None:
        for _ in range(runs):
            call()

    @contextmanager
    def recording(self) -> Iterator[Tape]:
        tape = Tape()
        self.tapes.append(tape)
        try:
            with tape:
                yield tape
        finally:
            tape.restore()


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
