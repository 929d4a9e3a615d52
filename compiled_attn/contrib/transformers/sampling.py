"""Sampling settings of transformers as ours; what the engine does not have is refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from compiled_attn.engine import SamplingParams
from compiled_attn.errors import EngineUnsupported

__all__ = ["sampling_for"]

_SERVED = {
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "RepetitionPenaltyLogitsProcessor",
}


def sampling_for(
    model: Any, settings: Any, end: Iterable[int], limit: int, number: int = 1
) -> SamplingParams:
    """The sampling of a request.

    Args:
        model: that is asked which processors of logits the settings mean.
        settings: a ``GenerationConfig``.
        end: tokens that end the text.
        limit: tokens to generate at most.
        number: of continuations.

    Raises:
        EngineUnsupported: beams, or a processor of logits that the engine has not.
    """
    if (settings.num_beams or 1) > 1:
        raise EngineUnsupported(
            f"expected num_beams=1, got {settings.num_beams}: the engine has no beams"
        )
    names = {type(each).__name__ for each in model._get_logits_processor(settings)}
    if unknown := sorted(names - _SERVED):
        raise EngineUnsupported(
            f"expected settings that the engine has, got some for {', '.join(unknown)}: leave them "
            "out, or uninstall"
        )
    given: dict[str, Any] = {"repetition_penalty": settings.repetition_penalty}
    if settings.do_sample:
        given["temperature"] = 1.0 if settings.temperature is None else settings.temperature
        given |= {name: getattr(settings, name, None) for name in ("top_k", "top_p", "min_p")}
    return SamplingParams(
        max_new_tokens=limit,
        stop_token_ids=tuple(token for token in end if token >= 0),
        ignore_eos=True,  # what ends a text is said by `end`
        n=number,
        **{name: value for name, value in given.items() if value is not None},
    )
