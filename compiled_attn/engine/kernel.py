"""The choice of the kernel that an engine's attention runs on, with its reasons."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from compiled_attn.engine.config import ConfigError, EngineConfig
from compiled_attn.engine.sizing import FORMS, Form
from compiled_attn.ops import AttentionTraits, NativeKernel, load
from compiled_attn.step import Parts, Tables

__all__ = ["ChosenKernel", "chosen_kernel"]

_BACKENDS = ("inductor", "aoti", "eager", "aot_eager")

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
    if lacks is None:
        ops = load()
        if ops.build is not None:
            built = f"built in {ops.build.seconds:.1f} s" if ops.build.seconds else "built before"
            return ChosenKernel("native", {"native": f"{ops.isa}, {built}"})
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
    weight = next(model.parameters())
    if config.backend_name not in _BACKENDS:
        return f"runs in graphs of {', '.join(_BACKENDS)}, not of {config.backend_name}"
    if config.buckets is not None and set(config.buckets.names) == set(Parts.axes):
        return f"has buckets over {', '.join(Tables.axes)}, not over {', '.join(Parts.axes)}"
    dtypes = weight.dtype, weight.dtype
    return NativeKernel().supports(AttentionTraits(weight.device.type, weight.dtype, dtypes))
