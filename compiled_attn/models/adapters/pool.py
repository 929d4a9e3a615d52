"""The LoRA adapters of a served model: their memory, and which rows of a step use which."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from compiled_attn.errors import AdapterError
from compiled_attn.models.adapters.adapter import Adapter
from compiled_attn.models.adapters.layers import AdaptedLinear, features_of
from compiled_attn.models.adapters.peft_model import PeftAdapters
from compiled_attn.ops.lora import MAX_RANK

__all__ = ["AdapterPool", "bytes_of_slots"]


class AdapterPool:
    """Slots for adapters in the linear layers of a model; slot 0 is that of no adapter.

    Graphs read the matrices and the slot of each row from memory, so adapters are written and
    removed without a capture.

    Args:
        max_adapters: adapters at most.
        max_rank: largest rank.
        targets: last parts of the names of the layers to adapt, such as ``q_proj``; none: all
            linear layers of the decoder.
        max_rows: tokens of a step at most.

    Attributes:
        given: adapters that the engine adds first; None: there are none.
    """

    given: PeftAdapters | None = None

    def __init__(
        self, max_adapters: int, max_rank: int, targets: Sequence[str], max_rows: int
    ) -> None:
        self.slots, self.max_rank, self.targets = 1 + max_adapters, max_rank, (*targets,)
        self.layers: dict[str, AdaptedLinear] = {}
        self._others: dict[str, str] = {}  # layers without adapters, and why
        # The trial of a model has a few rows, whatever the engine has.
        self._slot_of_row = torch.zeros(max(max_rows, 64), dtype=torch.int32)
        self._used = 0
        self._undo = contextlib.ExitStack()
        self._last_undo = contextlib.ExitStack()

    def take(self, given: PeftAdapters, undo: contextlib.ExitStack) -> None:
        """Takes the adapters of a ``PeftModel``, and what restores it after `remove`.

        Raises:
            AdapterError: one of them does not fit.
        """
        for adapter in given.adapters.values():
            self.check(adapter)
        self.given, self._last_undo = given, undo.pop_all()

    def install(
        self,
        model: nn.Module,
        decoder: Sequence[nn.Module],
        dtype: torch.dtype,
        run: Callable[[], object],
    ) -> None:
        """Replaces the target layers of a model by `AdaptedLinear`, until `remove`.

        Args:
            model: changed in place.
            decoder: its decoder layers, each of which is called once a step.
            dtype: of their inputs.
            run: computes some steps, to see which layers have other rows than a step has tokens.

        Raises:
            AdapterError: no layer can be adapted.
        """
        inside = {id(part) for layer in decoder for part in layer.modules()}
        for name, module in [*model.named_modules()]:
            if features_of(module) is None or id(module) not in inside:
                continue
            if self.targets and name.rpartition(".")[2] not in self.targets:
                self._others[name] = f"adapter_targets has {', '.join(self.targets)} only"
                continue
            adapted = AdaptedLinear(
                module, self.slots, self.max_rank, self._slot_of_row, dtype
            ).train(module.training)
            self._undo.enter_context(_replaced(model, name, adapted))
            self.layers[name] = adapted
        for name in self._with_other_rows(decoder, run):
            self._undo.enter_context(_replaced(model, name, self.layers.pop(name).base))
            self._others[name] = "it is not computed once for each token"
        if not self.layers:
            raise AdapterError(
                f"expected linear layers in the decoder of {type(model).__name__} named "
                f"{', '.join(self.targets) or 'anything'}, got none that every token goes "
                "through: leave adapters out, or name others in adapter_targets"
            )

    def remove(self) -> None:
        """Restores the layers of the model; a second call does nothing."""
        self._undo.close()
        self._last_undo.close()

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices of all slots."""
        return sum(each.a.nbytes + each.b.nbytes for each in self.layers.values())

    def check(self, adapter: Adapter) -> None:
        """Raises AdapterError unless an adapter fits the model and the pool."""
        where = f"adapter {adapter.source}"
        if not adapter.weights:
            raise AdapterError(f"{where}: expected weights, got none: train it")
        if adapter.rank > self.max_rank:
            raise AdapterError(
                f"{where}: expected a rank of at most {self.max_rank}, got {adapter.rank}: raise "
                f"max_adapter_rank (--max-adapter-rank), up to {MAX_RANK}"
            )
        for name, weight in adapter.weights.items():
            layer = self.layers.get(name)
            if layer is None and name in self._others:
                raise AdapterError(
                    f"{where}: it changes {name}, which gets no adapters, as "
                    f"{self._others[name]}: name it in adapter_targets, or train without it"
                )
            if layer is None:
                raise AdapterError(
                    f"{where}: it changes {name}, which the model does not have in its decoder: "
                    "it is of another base model"
                )
            if not weight.a.dim() == weight.b.dim() == 2 or weight.b.shape[1] != weight.rank:
                raise AdapterError(
                    f"{where}: expected a [rank, in] and b [out, rank] of {name}, got "
                    f"{[*weight.a.shape]} and {[*weight.b.shape]}: make them fit"
                )
            sizes, expected = (weight.a.shape[1], weight.b.shape[0]), features_of(layer.base)
            if sizes != expected:
                raise AdapterError(
                    f"{where}: expected {expected} inputs and outputs of {name}, got {sizes}: it "
                    "is of another base model"
                )

    def write(self, slot: int, adapter: Adapter) -> None:
        """Writes an adapter that `check` accepts into a slot that no request uses."""
        self.clear(slot)
        for name, weight in adapter.weights.items():
            layer = self.layers[name]
            layer.a[slot, : weight.rank].copy_(weight.a)
            layer.b[slot, : weight.rank].copy_(weight.b.T)
            layer.scale[slot] = weight.scale
            layer.ranks[slot] = weight.rank

    def clear(self, slot: int) -> None:
        """Makes a slot, which no request uses, one that changes nothing."""
        for layer in self.layers.values():
            layer.ranks[slot] = 0

    def use(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Sets the slots of the next step, of requests with so many tokens each."""
        if not any(slots) and not self._used:
            return
        rows = np.repeat(np.asarray(slots, np.int32), counts)
        view = self._slot_of_row.numpy()
        view[len(rows) : self._used] = 0
        view[: len(rows)] = rows
        self._used = len(rows) if any(slots) else 0

    def _with_other_rows(
        self, decoder: Sequence[nn.Module], run: Callable[[], object]
    ) -> Iterator[str]:
        """Names layers that a step does not call exactly once, with a row for each token."""
        calls: dict[str, list[int]] = {name: [] for name in self.layers}
        tokens: list[int] = []
        size = self._slot_of_row.numel()

        def count(name: str) -> Callable[[nn.Module, Any], None]:
            def hook(module: nn.Module, args: Any) -> None:
                rows = args[0].numel() // args[0].shape[-1]
                calls[name].append(rows if rows <= size else -1)

            return hook

        def count_tokens(_: nn.Module, args: Any, kwargs: Any) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            tokens.append(hidden.numel() // hidden.shape[-1])

        with contextlib.ExitStack() as hooks:
            for name, layer in self.layers.items():
                hooks.callback(layer.base.register_forward_pre_hook(count(name)).remove)
            first = decoder[0].register_forward_pre_hook(count_tokens, with_kwargs=True)
            hooks.callback(first.remove)
            run()
        yield from [name for name, rows in calls.items() if rows != tokens]


def bytes_of_slots(
    model: nn.Module, max_adapters: int, max_rank: int, targets: Sequence[str], itemsize: int
) -> int:
    """Returns the bytes of an `AdapterPool` for a model, before it is made.

    Counts all layers of a target's name, thus too many where some are no part of the decoder.

    Args:
        itemsize: bytes of an element of the matrices.
    """
    if not max_adapters:
        return 0
    sizes = [
        features_of(module) or (0, 0)
        for name, module in model.named_modules()
        if not targets or name.rpartition(".")[2] in targets
    ]
    return (1 + max_adapters) * max_rank * itemsize * sum(map(sum, sizes))


@contextlib.contextmanager
def _replaced(model: nn.Module, name: str, module: nn.Module) -> Iterator[None]:
    """Replaces a submodule, and restores it at the end."""
    parent, _, last = name.rpartition(".")
    children = model.get_submodule(parent)._modules
    before = children[last]
    children[last] = module
    try:
        yield
    finally:
        children[last] = before
