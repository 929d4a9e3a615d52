"""Finds the modules of a model that keep a state, and the states of each layer."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from compiled_attn.cache.state_cache import StateShape
from compiled_attn.models.hf.layers import decoder_layers, restore
from compiled_attn.models.hf.refusal import refusal
from compiled_attn.models.hf.states.carrier import StateRecorder
from compiled_attn.models.hf.states.rewrite import (
    RewriteError,
    carrier_name,
    is_rewritten,
    rewrite,
    uses,
)

__all__ = ["FoundStates", "Mixer", "find_mixers", "recording", "states_of"]

_STATE_METHODS = {
    "get_conv_state",
    "get_recurrent_state",
    "update_conv_state",
    "update_recurrent_state",
}


class Mixer(NamedTuple):
    """A module with states.

    Args:
        module: the module.
        place: its decoder layer.
        forward: its rewritten forward, a function.
        kinds: the functions that it calls, in order.
        first: number of its first call in the layer.
        read: names of its modules whose weights it reads.
    """

    module: nn.Module
    place: int
    forward: Callable[..., Any]
    kinds: tuple[str, ...]
    first: int
    read: tuple[str, ...]

    def weights_read(self) -> list[Tensor]:
        """Returns the weights that it reads, which therefore must not be packed."""
        parts = (getattr(self.module, name, None) for name in self.read)
        return [part.weight for part in parts if isinstance(part, nn.Linear)]


class FoundStates(NamedTuple):
    """The states of a model.

    Args:
        mixers: all modules with states.
        shapes: for each decoder layer the states of its calls, in order; empty for one without.
        carrier: name of the cache argument of the model.
    """

    mixers: tuple[Mixer, ...]
    shapes: tuple[tuple[StateShape, ...], ...]
    carrier: str

    def carrier_of(self, layer: nn.Module) -> str | None:
        """Returns the name of the cache argument of a decoder layer; None: it has none."""
        return carrier_name(type(layer).forward)


def find_mixers(model: PreTrainedModel) -> tuple[Mixer, ...]:
    """Returns the modules whose forward mixes tokens by known functions; leaves them unchanged.

    Raises:
        ModelRefused: a module keeps a state in another way.
    """
    found = [module for module in model.modules() if uses(type(module).forward)]
    places: dict[nn.Module, int] = {}
    for place, layer in enumerate(decoder_layers(model, found)):
        places |= dict.fromkeys(layer.modules(), place)
    mixers: list[Mixer] = []
    counts = dict.fromkeys(places.values(), 0)
    for module in model.modules():
        forward, name = type(module).forward, type(module).__name__
        if not uses(forward):
            code = getattr(inspect.unwrap(forward), "__code__", None)
            if code is not None and _STATE_METHODS & {*code.co_names}:
                raise refusal(model, f"with {name}, which keeps a state by code of its own")
            continue
        own = vars(module).get("forward")
        if own is not None and not is_rewritten(getattr(own, "__func__", own)):
            raise refusal(model, f"with {name}, whose forward was replaced")
        if module not in places:
            raise refusal(model, f"with {name} outside its decoder layers")
        place = places[module]
        try:
            made, kinds, read = rewrite(forward, counts[place])
        except RewriteError as error:
            raise refusal(model, f"with {name}, which {error}") from None
        mixers.append(Mixer(module, place, made, kinds, counts[place], read))
        counts[place] += len(kinds)
    return tuple(mixers)


@contextlib.contextmanager
def recording(
    model: PreTrainedModel, mixers: Sequence[Mixer], recorder: StateRecorder
) -> Iterator[dict[str, Any]]:
    """Context that yields the keywords by which a forward of the model records its states."""
    if not mixers:
        yield {}
        return
    before = [(mixer.module, vars(mixer.module).get("forward")) for mixer in mixers]
    try:
        for mixer in mixers:
            mixer.module.forward = MethodType(_recorded(mixer, recorder), mixer.module)
        yield {_carrier_of(model): recorder}
    finally:
        for module, own in before:
            restore(module, "forward", own)


def _recorded(mixer: Mixer, recorder: StateRecorder) -> Callable[..., Any]:
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        recorder.module = module
        return mixer.forward(module, *args, **kwargs)

    return forward


def _carrier_of(model: PreTrainedModel) -> str:
    name = carrier_name(model.forward)
    if name is None:
        raise refusal(model, "with states, but without an argument for a cache")
    return name


def states_of(
    model: PreTrainedModel, mixers: Sequence[Mixer], recorder: StateRecorder
) -> FoundStates | None:
    """Returns the states that were recorded; None: the model has none.

    Raises:
        ModelRefused: a mixer was not called once, or has a state that cannot be served.
    """
    if not mixers:
        return None
    layers = decoder_layers(model, [mixer.module for mixer in mixers])
    shapes: list[tuple[StateShape, ...]] = [()] * len(layers)
    for mixer in mixers:
        calls = [call for call in recorder.calls if call.module is mixer.module]
        expected = [*range(mixer.first, mixer.first + len(mixer.kinds))]
        name = type(mixer.module).__name__
        if [call.number for call in calls] != expected:
            raise refusal(model, f"with {name}, which does not mix its tokens once a step")
        for call in calls:
            if call.problem is not None:
                raise refusal(model, f"with {name}, which {call.problem}")
        shapes[mixer.place] += tuple(StateShape(c.kind, c.shape, c.dtype) for c in calls)
    for place in {mixer.place for mixer in mixers}:
        if carrier_name(type(layers[place]).forward) is None:
            name = type(layers[place]).__name__
            raise refusal(model, f"with {name}, which has no argument for a cache")
    return FoundStates(tuple(mixers), tuple(shapes), _carrier_of(model))
