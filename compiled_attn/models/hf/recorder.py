"""Records how each layer of a model calls attention, in a forward that computes none.

Of layers with states it records these, which it computes by the model's own functions.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from compiled_attn.errors import ModelRefused
from compiled_attn.models.hf.layers import carrying, decoder_layers
from compiled_attn.models.hf.refusal import failure, plain_attention
from compiled_attn.models.hf.states.carrier import StateRecorder
from compiled_attn.models.hf.states.found import (
    FoundStates,
    Mixer,
    recording,
    states_of,
)

__all__ = ["RECORDER_NAME", "AttentionCall", "Recorder", "record", "takes_logits_to_keep"]

RECORDER_NAME = "compiled_attn_recorder"
"""Name of an attention that records its calls and computes nothing."""

_TOKENS = 3
_KNOWN = {"s_aux", "position_ids", "logits_to_keep"}

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention function.

    Args:
        module: the attention module.
        query, key, value: ``[1, H, T, D]``, ``[1, Hk, T, D]``, ``[1, Hk, T, Dv]``.
        window: sliding window in tokens; None: none.
        has_mask: whether a mask was passed.
        sees: transformers' function of that mask; None if it was not built by transformers.
        others: tensors among the keywords that our attention would ignore.
        is_carried: whether the layer does not forward keywords, see `layer_region`.
        place: the decoder layer that made the call; None: it is in none.
        number: ``place`` if several layers share a ``layer_idx``; None: they do not.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    window: int | None
    has_mask: bool
    sees: MaskFunction | None
    others: tuple[str, ...]
    is_carried: bool
    place: int | None
    number: int | None = None

    @property
    def layer(self) -> int | None:
        """The ``layer_idx`` of the module, if it has one; the place if others have the same."""
        layer = getattr(self.module, "layer_idx", None) if self.number is None else self.number
        return None if layer is None else int(layer)


@dataclass
class Recorder:
    """Recorded calls, passed to the model as the keyword ``recorder``.

    ``mask`` is the mask of the current layer if the recorder is passed in its place; ``place`` is
    the current decoder layer.
    """

    calls: list[AttentionCall] = field(default_factory=list)
    mask: Tensor | None = None
    place: int | None = None


class _NoKeywords(ValueError):
    pass


def record(
    model: PreTrainedModel, mixers: Sequence[Mixer] = ()
) -> tuple[list[AttentionCall], FoundStates | None]:
    """Returns the attention calls of the model for three tokens, and the states of its layers.

    The model is left unchanged. ``mixers``: its modules with states.

    Raises:
        ModelRefused: it fails, its layers forward neither keywords nor a mask, or a state cannot
            be served.
    """
    recorder, states = Recorder(), StateRecorder()
    try:
        with plain_attention(model, RECORDER_NAME), torch.no_grad():
            try:
                _run(model, recorder, mixers, states)
            except _NoKeywords:
                recorder, states = Recorder(), StateRecorder()
                with carrying(decoder_layers(model), _pass_as_mask):
                    _run(model, recorder, mixers, states)
    except ModelRefused:
        raise
    except Exception as error:
        raise failure(model, f"on {_TOKENS} tokens", error) from error
    return _numbered(recorder.calls), states_of(model, mixers, states)


def _numbered(calls: Sequence[AttentionCall]) -> list[AttentionCall]:
    """Numbers calls by place if layers share a ``layer_idx``, and each makes one of them."""
    places: dict[int | None, list[int | None]] = {}
    for call in calls:
        places.setdefault(call.layer, []).append(call.place)
    shared = {
        layer
        for layer, own in places.items()
        if len(own) > 1 and None not in own and len({*own}) == len(own)
    }
    return [replace(call, number=call.place) if call.layer in shared else call for call in calls]


def _run(
    model: PreTrainedModel, recorder: Recorder, mixers: Sequence[Mixer], states: StateRecorder
) -> None:
    ids = torch.arange(_TOKENS, device=model.device)
    options = {"logits_to_keep": ids} if takes_logits_to_keep(model) else {}
    layers = decoder_layers(model, [mixer.module for mixer in mixers])
    with recording(model, mixers, states) as cache, _placing(layers, recorder):
        model(input_ids=ids.unsqueeze(0), use_cache=False, recorder=recorder, **options, **cache)


@contextlib.contextmanager
def _placing(layers: Sequence[nn.Module], recorder: Recorder) -> Iterator[None]:
    """Context in which a recorder has the place of the layer that runs."""

    def hook(place: int | None) -> Callable[..., None]:
        return lambda *_: setattr(recorder, "place", place)

    handles = [layer.register_forward_pre_hook(hook(n)) for n, layer in enumerate(layers)]
    handles += [layer.register_forward_hook(hook(None)) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def takes_logits_to_keep(model: PreTrainedModel) -> bool:
    """Whether the model can compute the logits of selected rows only."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def _pass_as_mask(keywords: dict[str, Any]) -> None:
    recorder: Recorder | None = keywords.pop("recorder", None)
    if recorder is not None:
        recorder.mask, keywords["attention_mask"] = keywords.get("attention_mask"), recorder


def _recording_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Recorder | None,
    *,
    recorder: Recorder | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Records the call; returns zeros ``[B, T, H, Dv]``, of which only the shape matters."""
    if is_carried := isinstance(attention_mask, Recorder):
        recorder, attention_mask = attention_mask, attention_mask.mask
    if recorder is None:
        raise _NoKeywords(f"{type(module).__name__} does not get the keywords of the call")
    sees = getattr(attention_mask, "sees", None)
    unknown = [name for name, given in others.items() if isinstance(given, Tensor)]
    unknown = [name for name in unknown if name not in _KNOWN]
    recorder.calls.append(
        AttentionCall(
            module, query, key, value, sliding_window, attention_mask is not None, sees,
            (*unknown,), is_carried, recorder.place,
        )
    )  # fmt: skip
    batch, heads, tokens, _ = query.shape
    return query.new_zeros(batch, tokens, heads, value.shape[-1]), None


def _recording_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: MaskFunction,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    **_: Any,
) -> Tensor:
    mask = torch.zeros(batch_size, 1, q_length, kv_length, dtype=dtype, device=device)
    mask.sees = mask_function  # type: ignore[attr-defined]
    return mask


AttentionInterface.register(RECORDER_NAME, _recording_attention)
AttentionMaskInterface.register(RECORDER_NAME, _recording_mask)
