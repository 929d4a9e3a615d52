"""Measures the rounding of a model by computing its logits in a wider dtype."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compiled_attn.models.hf.plain_cache import fresh_cache

__all__ = ["Rounding", "computed_in", "deviation_of", "last_logits", "rounding_of"]

_log = logging.getLogger(__name__)

_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}


class Rounding(NamedTuple):
    """Logits ``[vocab]`` of a wider dtype, in float64, and the standard deviation from them."""

    exact: Tensor
    deviation: float


def rounding_of(
    model: Any, text: list[int], logits: Tensor, kv_dtype: torch.dtype | None = None
) -> Rounding | None:
    """Measures the rounding of the logits after a text.

    Compares ``logits [vocab]`` (float64, computed in the model's own dtype) with float32 for
    bfloat16 and float16, with float64 for float32. An offset common to all logits does not count,
    as it changes no choice. Layers that round inputs to int8 are compared with exact inputs, as a
    last bit may round an input to the next int8. Returns None if there is no wider dtype, or the
    model cannot be computed in it. ``kv_dtype``: see `fresh_cache`.
    """
    if (wider := _WIDER.get(model.dtype)) is None:
        return None
    try:
        rounds = [each for each in model.modules() if getattr(each, "int8_inputs", False)]
        with _exact_inputs(rounds) if rounds else computed_in(model, wider):
            exact = last_logits(model, text, kv_dtype)
    except (RuntimeError, TypeError, ValueError, MemoryError) as error:
        _log.warning("the rounding of %s is not measured: %s", type(model).__name__, error)
        return None
    return Rounding(exact, deviation_of(logits, exact))


@contextlib.contextmanager
def _exact_inputs(layers: list[Any]) -> Iterator[None]:
    for layer in layers:
        layer.int8_inputs = False
    try:
        yield
    finally:
        for layer in layers:
            layer.int8_inputs = True


def deviation_of(logits: Tensor, exact: Tensor) -> float:
    """Standard deviation of the difference of two rows ``[vocab]``, over finite elements."""
    off = (logits - exact)[torch.isfinite(logits) & torch.isfinite(exact)]
    return off.std(correction=0).item()


def last_logits(model: Any, text: list[int], kv_dtype: torch.dtype | None = None) -> Tensor:
    """Returns logits ``[vocab]`` after a text, in float64, by one plain forward."""
    ids, cache = torch.tensor([text], device=model.device), fresh_cache(model, kv_dtype)
    logits: Tensor = model(ids, use_cache=bool(cache), logits_to_keep=1, **cache).logits[0, -1]
    return logits.double()


@contextlib.contextmanager
def computed_in(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Context in which a model computes in another dtype with its own weights.

    Weights of a module are converted when it is called and restored after it, so that only one
    module's weights exist twice; inputs are converted as well.
    """
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if any(map(_is_float, (*module._parameters.values(), *module._buffers.values()))):
                converter = _Converter(module, dtype)
                stack.callback(converter.restore)
                for hook in (
                    module.register_forward_pre_hook(converter.convert, with_kwargs=True),
                    module.register_forward_hook(converter.restore, always_call=True),
                ):
                    stack.callback(hook.remove)
        yield


class _Converter:
    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module = module
        self._dtype = dtype
        self._saved: list[tuple[dict[str, Any], str, Tensor]] = []

    def convert(self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        owners: tuple[dict[str, Any], ...] = self._module._parameters, self._module._buffers
        self._saved = [
            (owner, name, value)
            for owner in owners
            for name, value in owner.items()
            if _is_float(value)
        ]
        for owner, name, value in self._saved:
            converted = value.detach().to(self._dtype)
            is_parameter = isinstance(value, nn.Parameter)
            owner[name] = nn.Parameter(converted, False) if is_parameter else converted
        return tuple(map(self._converted, args)), {
            name: self._converted(value) for name, value in kwargs.items()
        }

    def restore(self, *_: object) -> None:
        for owner, name, value in self._saved:
            owner[name] = value
        self._saved = []

    def _converted(self, value: Any) -> Any:
        return value.to(self._dtype) if _is_float(value) else value


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
