"""The rounding of a model, measured: its logits once more, with wider numbers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compiled_attn.hf.plain_cache import PlainCaches

__all__ = ["Rounding", "computed_in", "deviation_of", "last_logits", "rounding_of"]

_log = logging.getLogger(__name__)

_NOTHING_KEPT = PlainCaches()
_WIDER = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float64,
}


class Rounding(NamedTuple):
    """The rounding of one row of logits.

    Args:
        exact: ``[vocab]`` float64, the logits with wider numbers.
        deviation: standard deviation over the row of what the model's own dtype makes of them.
    """

    exact: Tensor
    deviation: float


def rounding_of(
    model: Any, text: list[int], logits: Tensor, caches: PlainCaches = _NOTHING_KEPT
) -> Rounding | None:
    """Measures how far the logits behind a text are from those of wider numbers.

    bfloat16 and float16 are compared with float32, float32 with float64. What all logits are off by
    together does not count: it changes no choice.

    Args:
        model: a Hugging Face causal language model.
        text: token ids.
        logits: ``[vocab]`` float64, what the model makes of them in its own dtype.
        caches: that both are computed with.

    Returns:
        None where there is nothing wider, or the model cannot be computed in it.
    """
    if (wider := _WIDER.get(model.dtype)) is None:
        return None
    try:
        with computed_in(model, wider):
            exact = last_logits(model, text, caches)
    except (RuntimeError, TypeError, ValueError, MemoryError) as error:
        _log.warning("the rounding of %s is not measured: %s", type(model).__name__, error)
        return None
    return Rounding(exact, deviation_of(logits, exact))


def deviation_of(logits: Tensor, exact: Tensor) -> float:
    """Standard deviation of how far the finite ones of two rows ``[vocab]`` are from each other."""
    off = (logits - exact)[torch.isfinite(logits) & torch.isfinite(exact)]
    return off.std(correction=0).item()


def last_logits(model: Any, text: list[int], caches: PlainCaches = _NOTHING_KEPT) -> Tensor:
    """Logits ``[vocab]`` behind a text, in float64: one plain forward."""
    ids, cache = torch.tensor([text], device=model.device), caches.fresh()
    logits: Tensor = model(ids, use_cache=bool(cache), logits_to_keep=1, **cache).logits[0, -1]
    return logits.double()


@contextlib.contextmanager
def computed_in(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Let a model compute in another dtype, with the weights that it has.

    Each module's own weights are converted when it is called and given back after it, so that no
    more than one module's are there twice; what arrives is converted as well.
    """
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if any(map(_is_float, (*module._parameters.values(), *module._buffers.values()))):
                lent = _Lent(module, dtype)
                stack.callback(lent.give_back)
                for hook in (
                    module.register_forward_pre_hook(lent.take, with_kwargs=True),
                    module.register_forward_hook(lent.give_back, always_call=True),
                ):
                    stack.callback(hook.remove)
        yield


class _Lent:
    """The own weights of a module, kept here while it has converted ones."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module = module
        self._dtype = dtype
        self._kept: list[tuple[dict[str, Any], str, Tensor]] = []

    def take(self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        owners: tuple[dict[str, Any], ...] = self._module._parameters, self._module._buffers
        for owner in owners:
            for name, value in owner.items():
                if value is not None and _is_float(value):
                    self._kept.append((owner, name, value))
        for owner, name, value in self._kept:
            converted = value.detach().to(self._dtype)
            is_parameter = isinstance(value, nn.Parameter)
            owner[name] = nn.Parameter(converted, False) if is_parameter else converted
        return tuple(map(self._converted, args)), {
            name: self._converted(value) for name, value in kwargs.items()
        }

    def give_back(self, *_: object) -> None:
        for owner, name, value in self._kept:
            owner[name] = value
        self._kept = []

    def _converted(self, value: Any) -> Any:
        return value.to(self._dtype) if _is_float(value) else value


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
