"""The kernel of an engine: the native one where it can serve, and which weights it packs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedModel

from compiled_attn.engine.config import ConfigError, EngineConfig
from compiled_attn.engine.sizing import FORMS, Form
from compiled_attn.hf.packed import (
    halved_weights,
    packable,
    packed_weights,
    quantised_weights,
)
from compiled_attn.ops import AttentionTraits, NativeKernel, load
from compiled_attn.ops.packed_linear import Packing, as_int8, as_packed
from compiled_attn.ops.tuning import tuning
from compiled_attn.step import Parts, Tables

__all__ = ["ChosenKernel", "chosen_kernel", "packs"]

_BACKENDS = ("inductor", "aoti", "eager", "aot_eager", "cudagraph")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChosenKernel:
    """The kernel that is taken.

    Args:
        name: "native", or "portable".
        notes: for the native kernel what it is here, or why it is not taken.
        is_fallback: whether the native one would have been taken, but could not be built.
    """

    name: str
    notes: Mapping[str, str] = field(default_factory=dict)
    is_fallback: bool = False

    @property
    def form(self) -> Form:
        """The form of its steps."""
        return FORMS[self.name]


def chosen_kernel(model: PreTrainedModel, config: EngineConfig) -> ChosenKernel:
    """The kernel of an engine; builds the native one if it comes into question.

    Raises:
        ConfigError: it must be native and cannot; or it could be, but the build fails (strict).
    """
    if config.kernel == "portable":
        return ChosenKernel("portable", {"native": "not asked for"})
    lacks = _lacks(model, config)
    is_fallback = lacks is None
    device = model.device.type
    if lacks is None and device != "cpu":  # the dispatcher has it
        return ChosenKernel("native", {"native": f"the op's kernel for {device}"})
    if lacks is None:
        ops = load()
        if ops.build is not None:
            notes = {"native": str(ops.build)}
            if ops.tuning is not None:
                notes["tuning"] = str(ops.tuning.tuning)
            return ChosenKernel("native", notes)
        lacks = ops.why_not_native or "not built"
        if config.strict:
            raise ConfigError(
                f"the native kernel cannot be built here: {lacks}; or take kernel 'portable' "
                "(--kernel portable)"
            )
    if config.kernel == "native":
        raise ConfigError(f"kernel 'native' cannot serve here: {lacks}: take 'auto' or 'portable'")
    _log.info("the engine takes portable attention, not the native kernel: %s", lacks)
    return ChosenKernel("portable", {"native": lacks}, is_fallback)


def _lacks(model: PreTrainedModel, config: EngineConfig) -> str | None:
    dtype = model.dtype
    if config.backend_name not in _BACKENDS:
        return f"runs in graphs of {', '.join(_BACKENDS)}, not of {config.backend_name}"
    if config.buckets is not None and set(config.buckets.names) == set(Parts.axes):
        return f"has buckets over {', '.join(Tables.axes)}, not over {', '.join(Parts.axes)}"
    kept = config.cache_dtype or dtype
    return NativeKernel().supports(AttentionTraits(model.device.type, dtype, (kept, kept)))


def packs(
    model: PreTrainedModel, config: EngineConfig, kernel: ChosenKernel
) -> Callable[[Tensor], Packing | None] | None:
    """How weights are to be packed; None: none of them.

    Raises:
        ConfigError: they must be, and cannot: no such weights, or not the kernel that does it.
    """
    weights, packed = config.weights, packed_weights(model)
    is_asked_for = weights in ("packed", "int8")
    if is_asked_for and kernel.name != "native":
        raise ConfigError(
            f"weights {weights!r} are for the native kernel, got {kernel.name} "
            f"({kernel.notes['native']}): take weights 'auto' or 'plain'"
        )
    quantises = weights == "int8"
    asked = as_int8 if quantises else as_packed
    if is_asked_for and not any(map(asked, packable(model))) and not packed:
        dtypes = "bfloat16" if quantises else "bfloat16 or float32"
        raise ConfigError(
            f"expected weights of {dtypes} that can be packed (weights {weights!r}), got none: "
            "take weights 'auto' or 'plain'"
        )
    if packed and bool(quantised_weights(model)) is not quantises:
        raise ConfigError(
            f"expected a model of plain weights for weights {weights!r}, got one that an engine "
            f"before has made {'int8' if quantised_weights(model) else 'packed'}: load it again"
        )
    if weights == "packed" and halved_weights(model):
        raise ConfigError(
            "expected a model of plain weights for weights 'packed', got one of which an engine "
            "before has kept float32 in 16 bits: load it again"
        )
    if weights == "plain" or kernel.name != "native":
        return None
    return asked if is_asked_for else tuning().packing
