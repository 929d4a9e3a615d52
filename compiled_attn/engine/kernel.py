"""Chooses the kernel of an engine, native if it can serve, and how to pack the weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from compiled_attn.engine.config import ConfigError, EngineConfig
from compiled_attn.engine.sizing import LAYOUTS, LayoutType
from compiled_attn.errors import NativeUnavailable
from compiled_attn.models.packed import packable, packed_weights, quantised_formats, widened_weights
from compiled_attn.ops import AttentionTraits, NativeKernel, NativeOps, load
from compiled_attn.ops.packed_linear import BITS_OF, Packing, as_packed, as_rounded
from compiled_attn.ops.paged_attention import build_ahead
from compiled_attn.ops.tuning import tuning
from compiled_attn.step import PartsLayout, TableLayout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ChosenKernel", "chosen_kernel", "packs"]

_BACKENDS = ("inductor", "aoti", "eager", "aot_eager", "cudagraph", "accelerator")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChosenKernel:
    """The chosen kernel.

    Args:
        notes: the build of the native kernel, or why it is not used.
        is_fallback: whether native would have been chosen, but could not be built.
    """

    name: str
    notes: Mapping[str, str] = field(default_factory=dict)
    is_fallback: bool = False

    @property
    def layout(self) -> LayoutType:
        """The layout of its steps."""
        return LAYOUTS[self.name]


def chosen_kernel(model: PreTrainedModel, config: EngineConfig) -> ChosenKernel:
    """Chooses the kernel of an engine; builds the native one if it is a candidate.

    Raises:
        ConfigError: it must be native and cannot; or it could be, but the build fails (strict).
    """
    if config.kernel == "portable":
        return ChosenKernel("portable", {"native": "not requested"})
    lacks = _lacks(model, config)
    is_fallback = lacks is None
    device = model.device.type
    if lacks is None and device != "cpu":  # the dispatcher has it
        return ChosenKernel("native", {"native": f"the op's kernel for {device}"})
    if lacks is None:
        ops, lacks = _loaded(config.cache_dtype or model.dtype)
        if ops.build is not None and lacks is None:
            notes = {"native": str(ops.build)}
            if ops.tuning is not None:
                notes["tuning"] = str(ops.tuning.tuning)
            return ChosenKernel("native", notes)
        lacks = lacks or ops.why_not_native or "not built"
        if config.strict:
            raise ConfigError(
                f"the native kernel cannot be built here: {lacks}; or choose kernel 'portable' "
                "(--kernel portable)"
            )
    if config.kernel == "native":
        raise ConfigError(
            f"kernel 'native' cannot serve here: {lacks}: choose 'auto' or 'portable'"
        )
    _log.info("the engine uses portable attention, not the native kernel: %s", lacks)
    return ChosenKernel("portable", {"native": lacks}, is_fallback)


def _loaded(cache_dtype: torch.dtype) -> tuple[NativeOps, str | None]:
    """The ops, with the kernels of a cache before a request needs them, or why there are none."""
    build_ahead(cache_dtype)  # both at once
    ops = load()
    try:
        return (ops if ops.build is None else load(cache_dtype=cache_dtype)), None
    except NativeUnavailable as error:
        return ops, str(error)


def _lacks(model: PreTrainedModel, config: EngineConfig) -> str | None:
    dtype = model.dtype
    if config.backend_name not in _BACKENDS:
        return f"runs in graphs of {', '.join(_BACKENDS)}, not of {config.backend_name}"
    if config.buckets is not None and set(config.buckets.names) == set(PartsLayout.axes):
        expected, got = (", ".join(each.axes) for each in (TableLayout, PartsLayout))
        return f"has buckets over {expected}, not over {got}"
    stored = config.cache_dtype or dtype
    return NativeKernel().supports(AttentionTraits(model.device.type, dtype, (stored, stored)))


def packs(
    model: PreTrainedModel, config: EngineConfig, kernel: ChosenKernel
) -> Callable[[Tensor], Packing | None] | None:
    """Returns how to pack weights; None: not at all.

    Raises:
        ConfigError: packing is required, but the weights or the kernel do not support it.
    """
    weights, packed = config.weights, packed_weights(model)
    if config.same_bits and weights == "auto":
        weights = "packed"  # not what is fastest here: other machines must choose the same
    is_required = weights == "packed" or weights in BITS_OF
    if is_required and kernel.name != "native":
        raise ConfigError(
            f"weights {weights!r} are for the native kernel, got {kernel.name} "
            f"(native: {kernel.notes['native']}): choose weights 'auto' or 'plain'"
        )
    packing = as_rounded(cast(Packing, weights)) if weights in BITS_OF else as_packed
    if is_required and not any(map(packing, packable(model))) and not packed:
        raise ConfigError(
            "expected weights of bfloat16 or float32 that can be packed (weights "
            f"{weights!r}), got none: choose weights 'auto' or 'plain'"
        )
    formats = quantised_formats(model)
    rounded = formats & {*BITS_OF}
    if formats - rounded and weights in BITS_OF:
        raise ConfigError(
            f"expected weights of bfloat16 or float32 for weights {weights!r}, got some of "
            f"{', '.join(sorted(formats - rounded))}: choose weights 'auto'"
        )
    if packed and not formats - rounded and rounded != {weights} & {*BITS_OF}:
        made = ", ".join(rounded) or "packed"
        raise ConfigError(
            f"expected a model of plain weights for weights {weights!r}, got one that an "
            f"earlier engine made {made}: load it again"
        )
    if weights == "packed" and widened_weights(model):
        raise ConfigError(
            "expected a model of plain weights for weights 'packed', got one of which an "
            "earlier engine stored float32 in 16 bits: load it again"
        )
    is_plain = weights == "plain" or (model.device.type != "cpu" and not is_required)
    if is_plain or kernel.name != "native":
        return None
    return packing if is_required else tuning().packing
