"""A Hugging Face causal LM whose forward is one engine step, and what must not change in it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import is_, itemgetter
from typing import Any

from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from transformers import PreTrainedConfig, PreTrainedModel

from compiled_attn.attention.by_parts import DENSE_KERNELS
from compiled_attn.cache.kv_cache import PagedKVCache
from compiled_attn.errors import ModelChanged, ModelRefused
from compiled_attn.hf.adapters import ActiveAdapters
from compiled_attn.hf.attention import (
    ATTENTION_NAME,
    PagedStep,
    WantedRows,
    keep_latents,
    reads,
)
from compiled_attn.hf.equality import check_equal, check_near, plain_logits
from compiled_attn.hf.layers import call_through, decoder_layers, layer_region, restore
from compiled_attn.hf.packed import (
    halved_weights,
    pack_linears,
    packed_weights,
    quantised_weights,
)
from compiled_attn.hf.packed_weight import PackedWeight
from compiled_attn.hf.recorder import takes_logits_to_keep
from compiled_attn.hf.region_keys import region_keys, relate_sizes, without_numbers
from compiled_attn.hf.shapes import calls_by_layer, check_fits
from compiled_attn.ops import AttentionTraits, Implementation, choose
from compiled_attn.ops.packed_linear import Packing
from compiled_attn.step import PartsLayout, StepBatch, StepLayout, TableBatch
from graphs.capture.module_state import ModuleState

__all__ = ["ModelChanged", "PagedCausalLM", "Snapshot"]

_config, _training = itemgetter("config"), itemgetter("training")
_REMEDY = "make a new engine of the model as it is now"
_log = logging.getLogger(__name__)


class Snapshot:
    """What must not change in a model, taken when it was right; comparing it costs microseconds.

    Watched: the attention of every configuration in it and the configuration that each attention
    module holds; training mode and forwards of the decoder layers and of the attention modules; the
    object of each parameter; the address of one parameter a decoder layer, which a cast or a move
    changes; which adapters of peft are active. Values of parameters are not: no backend keeps a
    copy of them. Other storage of a single parameter is left to the graphs: `graphs.StaleGraph`
    where they hold addresses, a changed guard where they are compiled; else they read what is there
    now. A write to a weight that was packed as integers is watched too, see
    `compiled_attn.hf.packed_weight`; sub-modules, forward hooks and attributes are watched by a
    `ModuleState`.

    Args:
        model: the model.
        layers: its decoder layers.
        attentions: its attention modules.
    """

    def __init__(
        self, model: PreTrainedModel, layers: Sequence[nn.Module], attentions: Sequence[nn.Module]
    ) -> None:
        self._model, self._layers, self._attentions = model, layers, attentions
        self.take()

    def take(self) -> None:
        """Takes the model as it is now."""
        model, layers, attentions = self._model, self._layers, self._attentions
        self._configs = _configs_of(model)
        self._implementations = [_attention_of(config) for config in self._configs]
        self._holders = [m.__dict__ for m in attentions if "config" in m.__dict__]
        self._held = [*map(_config, self._holders)]
        self._modes = [each.__dict__ for each in (model, *layers, *attentions)]
        self._forwards = [each.get("forward") for each in self._modes]
        self._names, self._owners, self._parameters = _parameters_of(model)
        self._traps = {each.trap for each in self._parameters if isinstance(each, PackedWeight)}
        self._samples = [*_samples_of(model, layers)]
        self._addresses = [*map(Tensor.data_ptr, self._samples)]
        self._adapters = ActiveAdapters(model)
        self._state = ModuleState(model)

    def difference(self) -> str | None:
        """What changed, and the remedy; None: nothing that is watched."""
        for config, before in zip(self._configs, self._implementations, strict=True):
            if (now := _attention_of(config)) != before:
                return (
                    f"its attention is {now!r} and was {before!r}: restore it with "
                    f"model.set_attn_implementation({before!r})"
                )
        if not all(map(is_, map(_config, self._holders), self._held)):
            return "an attention module has another config: put the old one back"
        if True in map(_training, self._modes):
            return "it is in training mode: call model.eval()"
        if [modes.get("forward") for modes in self._modes] != self._forwards:
            return "the forward of a layer was replaced or removed: put the old one back"
        if any(trap.is_sprung for trap in self._traps):
            return (
                "a packed weight was written to, which changes nothing: load the model again, and "
                "write new values with load_state_dict()"
            )
        if self._has_other_parameters():
            return f"a parameter was replaced: {_REMEDY}, or write into the old one with copy_()"
        if [*map(Tensor.data_ptr, self._samples)] != self._addresses:
            return f"its parameters were cast or moved: {_REMEDY}"
        if self._adapters.have_changed():
            return f"other adapters are active, merged or switched off: {_REMEDY}, or switch back"
        if changed := self._state.changed():
            return f"{changed}: put back what was there, or {_REMEDY}"
        return None

    def _has_other_parameters(self) -> bool:
        """Whether a module has another object as a parameter; three times faster than by ``is``."""
        try:
            # Lists compare by identity first. What is not the same compares as a tensor does, which
            # has no truth value as a whole.
            return [*map(dict.get, self._owners, self._names)] != self._parameters
        except (RuntimeError, TypeError):
            return True


def _configs_of(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Every configuration that a module of the model, or another configuration, holds."""
    found: dict[int, PreTrainedConfig] = {}
    waiting = [m.__dict__.get("config") for m in model.modules()]
    while waiting:
        config = waiting.pop()
        if isinstance(config, PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return [*found.values()]


def _attention_of(config: PreTrainedConfig) -> Any:
    return config.__dict__.get("_attn_implementation_internal")


def _parameters_of(model: nn.Module) -> tuple[list[str], list[dict[str, Any]], list[Tensor]]:
    rows = [
        (name, module._parameters, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    names, owners, parameters = zip(*rows, strict=True) if rows else ((), (), ())
    return [*names], [*owners], [*parameters]


def _samples_of(model: nn.Module, layers: Iterable[nn.Module]) -> Iterable[Tensor]:
    for part in (*layers, model):
        # Plain ones where there are any: torch takes a while to look at a subclass.
        yield from sorted(part.parameters(), key=lambda each: isinstance(each, PackedWeight))[:1]


class _WithRegions(nn.Module):
    """A model whose layers are regions of these keys."""

    def __init__(self, paged: PagedCausalLM, keys: tuple[int | None, ...]) -> None:
        super().__init__()
        self.paged, self._keys = paged, keys

    def forward(self, *inputs: Tensor | None) -> Tensor:
        paged = self.paged
        return paged.compute(paged.layout.batch(inputs), paged.cache, self._keys)


class PagedCausalLM(nn.Module):
    """A Hugging Face causal LM whose forward is one engine step over a `PagedKVCache`.

    Before it serves, a model is tried: it is run on three tokens to see how each layer calls
    attention, then two prompts of six tokens are computed by the unmodified model with eager
    attention, in two steps over a small paged cache, and again for the last rows alone, see
    `compiled_attn.hf.last_layer`. That is six forwards of 3 to 12 tokens; over a cache of 8 bits
    four more, whose logits must then be near.

    Args:
        model: any causal LM of transformers whose attention goes through `AttentionInterface`;
            its attention implementation is switched to ours, and each decoder layer is marked as a
            region that a graph compiles once. A model that is refused is left as it was.
        cache: the paged cache, see `cache_for`.
        layout: how steps become tensors; None: in parts, for plain torch.
        packs: how a weight ``[N, K]`` of a linear layer is to be packed, see
            `compiled_attn.hf.packed.pack_linears`; None: none is. A model whose logits then differ
            keeps its layers; one whose logits are far from what they were in int8 is refused.

    Attributes:
        packed: how many weights are packed, also by an engine before.
        quantised, halved: how many of these are int8, and how many the upper halves of float32.
        vocab, logits_dtype: of its rows of logits.

    Raises:
        ModelRefused: a layer does not attend once a step through `AttentionInterface` (recurrent or
            convolution layers, attention code of the model's own, several calls), sees other tokens
            than those before it in a window (chunks, masks of its own); or the logits of the paged
            steps differ from those of the unmodified model, or in a cache of 8 bits are far from
            them.
        ValueError: the cache is not one of this model.

    Shape:
        - forward(fields of a batch of the layout) -> logits ``[L, vocab]`` of the rows
          ``logits_index``
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PagedKVCache,
        layout: StepLayout | None = None,
        packs: Callable[[Tensor], Packing | None] | None = None,
    ) -> None:
        super().__init__()
        self.layout: StepLayout = layout or PartsLayout(cache.num_blocks, cache.block_size)
        self.model = model
        self.cache = cache
        calls = calls_by_layer(model)
        check_fits(model, calls, cache)
        self.windows = tuple(sorted({call.window for call in calls if call.window}))
        self._attentions = [call.module for call in calls]
        self._region = layer_region(any(call.is_carried for call in calls))
        self._are_regions = all(shape.same_as is None for shape in cache.shapes)
        self._layers = decoder_layers(model, self._attentions)
        self._numbers = [self._number_of(layer) for layer in self._layers]
        self._keeps = takes_logits_to_keep(model)
        self._ends_early = False
        expected = plain_logits(model)
        self.vocab, self.logits_dtype = expected.shape[-1], expected.dtype
        with contextlib.ExitStack() as undo:
            self._switch(undo)
            self._reads_numbers = not self._is_equal_without_numbers(expected)
            if self._reads_numbers:
                check_equal(self, expected)
            self._end_early(expected)
            if packs is not None:
                self._pack(packs, expected, undo)
            self.packed, self.quantised = packed_weights(model), quantised_weights(model)
            self.halved = halved_weights(model)
            undo.pop_all()
        self._snapshot = Snapshot(self.model, self._layers, self._attentions)

    def forward(self, *inputs: Tensor | None) -> Tensor:
        """Computes a step: the fields of its batch in order, to logits ``[L, vocab]``."""
        return self.compute(self.layout.batch(inputs), self.cache)

    def capture_variants(self) -> Sequence[nn.Module]:
        """For `graphs.capture`: with layers as regions, which may fail; and without."""
        if not self._are_regions:
            return (self,)
        keys = region_keys(
            self._layers, self._numbers, self.cache, reads_numbers=self._reads_numbers
        )
        return _WithRegions(self, keys), self

    def compute(
        self,
        step: StepBatch | TableBatch,
        cache: PagedKVCache,
        regions: tuple[int | None, ...] | None = None,
    ) -> Tensor:
        """Computes a step over another cache of the same layers, to logits ``[L, vocab]``.

        ``regions``: see `PagedStep`.
        """
        rows, paged = step.logits_index, self._paged(step, cache)
        if regions is not None:
            relate_sizes(paged.by_window[None])
            packed = self._region.pack(paged.by_window)
            paged = replace(paged, regions=regions, packed=packed)
        has_all = paged.wanted is None  # hidden states; else those of the rows
        kept = {"logits_to_keep": rows} if has_all and self._keeps else {}
        logits: Tensor = self.model(
            input_ids=step.input_ids.unsqueeze(0),
            position_ids=step.positions.unsqueeze(0),
            use_cache=False,
            paged=paged,
            **kept,
        ).logits[0]
        return logits[rows] if has_all and not self._keeps else logits

    def _paged(self, step: StepBatch | TableBatch, cache: PagedKVCache) -> PagedStep:
        size, windows = cache.block_size, self.windows
        paged = PagedStep.of(cache, self.layout.metadata(step, size), windows)
        rows, tokens, wanted = step.logits_index, step.input_ids, None
        if self._ends_early and not statically_known_true(len(tokens) <= len(rows)):
            wanted = self.layout.wanted(step, size)
        if wanted is None:
            return paged
        return replace(paged, wanted=WantedRows(rows, PagedStep.of(cache, wanted, windows)))

    def remember(self) -> None:
        """Takes the model as it is now for what must not change, see `check_unchanged`."""
        self._snapshot.take()  # no other object: graphs watch the attributes of this module

    def check_unchanged(self) -> None:
        """Raises ModelChanged unless the model is as it was made, or as it was at `remember`.

        For each step: tens of microseconds for 30 layers. What is watched: see
        `compiled_attn.hf.model.Snapshot`. Values of parameters may change at any time, but what
        is in the cache is of the old ones.
        """
        if changed := self._snapshot.difference():
            raise ModelChanged(
                f"expected a {type(self.model).__name__} as it was at warmup, but {changed}"
            )

    def _number_of(self, layer: nn.Module) -> int | None:
        """Of its only attention among all; None: it has none, or several."""
        parts = {*layer.modules()}
        own = [number for number, module in enumerate(self._attentions) if module in parts]
        return own[0] if len(own) == 1 else None

    def _is_equal_without_numbers(self, expected: Tensor) -> bool:
        with without_numbers(self._layers), contextlib.suppress(ModelRefused):
            check_equal(self, expected)
            return True
        return False

    def _end_early(self, expected: Tensor) -> None:
        """Lets the last layer compute wanted rows alone, unless that changes the logits."""
        layout = self.layout.over(2, 1, 1)
        padding = layout.padding(dict.fromkeys(layout.axes, 1))
        if not self._layers or not self._are_regions or layout.wanted(padding, 1) is None:
            return
        self._ends_early = True
        try:
            check_equal(self, expected, last_only=True)
        except ModelRefused as error:
            self._ends_early = False
            _log.info("the last layer computes all rows: %s", error)

    def _pack(
        self,
        packs: Callable[[Tensor], Packing | None],
        expected: Tensor,
        undo: contextlib.ExitStack,
    ) -> None:
        """Packs weights, unless that changes the logits by more than rounding."""
        keeps_value = self.cache.keeps_value
        taken_apart = [reads(m) for n, m in enumerate(self._attentions) if not keeps_value(n)]
        with contextlib.ExitStack() as trial:
            pack_linears(
                self.model,
                trial,
                lambda w: packs(w) if all(w is not kept for kept in taken_apart) else None,
            )
            if quantised_weights(self.model):
                check_near(self, expected)
                undo.enter_context(trial.pop_all())
                return
            try:
                check_equal(self, expected)
            except ModelRefused as error:
                halved = halved_weights(self.model)
                _log.warning("weights are not packed%s: %s", " in 16 bits" * bool(halved), error)
            else:
                undo.enter_context(trial.pop_all())
                return
        if halved:  # which code of the model's own may not bear
            self._pack(lambda w: "packed" if packs(w) else None, expected, undo)

    def _switch(self, undo: contextlib.ExitStack) -> None:
        """Makes the model attend to the paged cache, and says how to undo it."""
        model = self.model
        undo.callback(model.set_attn_implementation, model.config._attn_implementation)
        undo.callback(model.train, model.training)
        model.eval().set_attn_implementation(ATTENTION_NAME)
        for place, layer in enumerate(self._layers):
            undo.callback(restore, layer, "forward", layer.__dict__.get("forward"))
            call_through(
                layer,
                place,
                self._numbers[place],
                self._region,
                is_last=layer is self._layers[-1],
            )
        for number, module in enumerate(self._attentions):
            if not self.cache.keeps_value(number):
                undo.callback(restore, module, "expand_kv", module.__dict__.get("expand_kv"))
                keep_latents(module)

    def kernel(self) -> Implementation:
        """The kernel that the model's attention chooses."""
        config = self.model.config.get_text_config()
        capped = bool(getattr(config, "attn_logit_softcapping", None))
        device, dtype = self.model.device.type, self.model.dtype
        head_dim = self.cache.head_dim
        traits = AttentionTraits(device, dtype, (dtype, dtype), head_dim, softcap=capped)
        return choose(traits, DENSE_KERNELS)
