"""A Hugging Face causal LM whose forward is one engine step."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from transformers import PreTrainedModel

from compiled_attn.attention.by_parts import DENSE_KERNELS
from compiled_attn.attention.step_shadow import logits_shadow, step_shadow
from compiled_attn.cache.kv_cache import PagedKVCache
from compiled_attn.errors import ModelChanged, ModelRefused
from compiled_attn.models.adapters import AdapterPool
from compiled_attn.models.hf.attention import (
    ATTENTION_NAME,
    LogitsRows,
    PagedStep,
    expansion_weight,
    store_latents,
)
from compiled_attn.models.hf.equality import check_equal, check_near, plain_logits
from compiled_attn.models.hf.layers import call_through, decoder_layers, layer_region, restore
from compiled_attn.models.hf.output_registry import use_own_entries
from compiled_attn.models.hf.recorder import takes_logits_to_keep
from compiled_attn.models.hf.region_keys import region_keys, relate_sizes, without_numbers
from compiled_attn.models.hf.shapes import (
    check_fits,
    check_layout,
    default_layout,
    layer_calls,
    numbers_in,
    numbers_of,
)
from compiled_attn.models.hf.snapshot import Snapshot
from compiled_attn.models.hf.states.carrier import StepStates
from compiled_attn.models.packed import (
    exact_inputs,
    pack_linears,
    packed_weights,
    quantised_formats,
    quantised_weights,
    widened_weights,
)
from compiled_attn.ops import AttentionTraits, Implementation, choose
from compiled_attn.ops.packed_linear import Packing
from compiled_attn.step import StepBatch, StepLayout, TableBatch

__all__ = ["ModelChanged", "PagedCausalLM"]

_log = logging.getLogger(__name__)


class _WithRegions(nn.Module):
    def __init__(self, paged: PagedCausalLM, keys: tuple[int | None, ...]) -> None:
        super().__init__()
        self.paged, self._keys = paged, keys

    def forward(self, *inputs: Tensor | None) -> Tensor:
        paged = self.paged
        return paged.compute(paged.layout.batch(inputs), paged.cache, self._keys)


class PagedCausalLM(nn.Module):
    """A Hugging Face causal LM whose forward is one engine step over a `PagedKVCache`.

    A trial decides whether the model is accepted: a forward of three tokens records how each layer
    calls attention; then the logits of two prompts of six tokens, by the unmodified model with
    eager attention, are compared with those of two steps over a small paged cache, and again with
    the last layer limited to the rows that need logits. An 8-bit cache adds four forwards.

    Args:
        model: any causal LM of transformers whose attention goes through `AttentionInterface`;
            its attention implementation is switched to ours, and each decoder layer becomes a
            region that a graph compiles once. A refused model is left unchanged.
        cache: the paged cache, see `cache_for`.
        layout: layout of steps; None: parts, for plain torch.
        packs: chooses the packing of a linear weight ``[N, K]``, see `pack_linears`; None: weights
            are not packed. If packing changes the logits, the layers stay unpacked; if rounding to
            4 or 8 bits changes them too much, the model is refused.
        adapters: installed in the model's layers, until its `remove`; all rows of the last layer
            are computed then.

    Attributes:
        packed: number of packed weights, including those packed by an earlier engine.
        quantised, widened: how many of them have 4 to 8 bits, and how many are the upper halves of
            float32.
        formats: formats of the former.
        vocab, logits_dtype: size and dtype of a row of logits.

    Raises:
        ModelRefused: a layer does not call attention exactly once per step through
            `AttentionInterface`, or sees other tokens than those before it in a window; or the
            logits of the paged steps differ from those of the unmodified model.
        ValueError: the cache does not fit this model.

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
        adapters: AdapterPool | None = None,
    ) -> None:
        super().__init__()
        self.layout = layout or default_layout(cache)
        use_own_entries(model)
        self.model = model
        self.cache = cache
        found = layer_calls(model)
        calls, self._states = found
        check_fits(model, found, cache)
        check_layout(model, cache, self.layout)
        self.windows = tuple(sorted({call.window for call in calls if call.window}))
        self._attentions = [call.module for call in calls]
        self._layer_numbers = numbers_of(calls)
        self._region = layer_region(any(call.is_carried for call in calls))
        self._are_regions = all(shape.same_as is None for shape in cache.shapes)
        mixers = [] if self._states is None else [mixer.module for mixer in self._states.mixers]
        self._layers = decoder_layers(model, [*self._attentions, *mixers])
        self._numbers = [numbers_in(calls, *each) for each in enumerate(self._layers)]
        self._takes_logits_to_keep = takes_logits_to_keep(model)
        self._cuts_last_layer = self._in_trial = False
        with exact_inputs(model), contextlib.ExitStack() as undo:
            expected = plain_logits(model)
            self.vocab, self.logits_dtype = expected.shape[-1], expected.dtype
            self._switch(undo)
            self._reads_numbers = not self._is_equal_without_numbers(expected)
            if self._reads_numbers:
                check_equal(self, expected)
            if adapters is None:
                self._try_cut_last_layer(expected)
            if packs is not None:
                self._pack(packs, expected, undo)
            self.packed, self.quantised = packed_weights(model), quantised_weights(model)
            if adapters is not None:
                check = check_near if self.quantised else check_equal
                undo.callback(adapters.remove)
                adapters.install(model, self._layers, model.dtype, lambda: check(self, expected))
            self.widened, self.formats = widened_weights(model), sorted(quantised_formats(model))
            undo.pop_all()
        self._snapshot = Snapshot(self.model, self._layers)

    def forward(self, *inputs: Tensor | None) -> Tensor:
        """Computes a step, given as the fields of its batch, to logits ``[L, vocab]``."""
        return self.compute(self.layout.batch(inputs), self.cache)

    def capture_variants(self) -> Sequence[nn.Module]:
        """Variants for `graphs.capture`: with layers as regions, which may fail, and without."""
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
        has_all = paged.logits is None  # whether the last layer returns all rows
        options: dict[str, Any] = {}
        if has_all and self._takes_logits_to_keep:
            options["logits_to_keep"] = rows
        if self._states is not None:
            options[self._states.carrier] = StepStates(paged)
        logits: Tensor = self.model(
            input_ids=step.input_ids.unsqueeze(0),
            position_ids=step.positions.unsqueeze(0),
            use_cache=False,
            paged=paged,
            **options,
        ).logits[0]
        return logits[rows] if has_all and "logits_to_keep" not in options else logits

    def _paged(self, step: StepBatch | TableBatch, cache: PagedKVCache) -> PagedStep:
        size, windows = cache.block_size, self.windows
        rows, tokens, shadow = step.logits_index, step.input_ids, cache.shadow
        numbers = self._layer_numbers
        paged = PagedStep.of(cache, self.layout.metadata(step, size), windows, numbers)
        if shadow is not None:
            paged = paged.with_shadow(lambda m, w: step_shadow(shadow, m, tokens, w))
        # Without a compiler the first run of the last layer would be computed for nothing.
        cuts = self._cuts_last_layer and (torch.compiler.is_compiling() or self._in_trial)
        if not cuts or statically_known_true(len(tokens) <= len(rows)):
            return paged
        few = self.layout.logits_metadata(step, size)
        if few is None:
            return paged
        last = PagedStep.of(cache, few, windows, numbers)
        if shadow is not None:
            count = len(tokens)
            last = last.with_shadow(lambda m, w: logits_shadow(shadow, m, rows, count, w))
        return replace(paged, logits=LogitsRows(rows, last))

    def remember(self) -> None:
        """Makes the current state of the model the one of `check_unchanged`."""
        self._snapshot.take()  # not a new object: graphs watch the attributes of this module

    def check_unchanged(self) -> None:
        """Raises ModelChanged if the model changed since it was created, or since `remember`.

        Called in every step: tens of microseconds for 30 layers. See `Snapshot` for what is
        watched. Values of parameters may change at any time; the cache then holds K/V of old ones.
        """
        if changed := self._snapshot.difference():
            raise ModelChanged(
                f"expected a {type(self.model).__name__} as it was at warmup, but {changed}"
            )

    def _is_equal_without_numbers(self, expected: Tensor) -> bool:
        with without_numbers(self._layers), contextlib.suppress(ModelRefused):
            check_equal(self, expected)
            return True
        return False

    def _try_cut_last_layer(self, expected: Tensor) -> None:
        layout = self.layout.over(2, 1, 1)
        padding = layout.padding(dict.fromkeys(layout.axes, 1))
        if not self._layers or not self._are_regions or layout.logits_metadata(padding, 1) is None:
            return
        if self._states is not None and self._states.shapes[-1]:
            return  # which all tokens must reach
        self._cuts_last_layer = self._in_trial = True
        try:
            check_equal(self, expected, last_only=True)
        except ModelRefused as error:
            self._cuts_last_layer = False
            _log.info("the last layer computes all rows: %s", error)
        finally:
            self._in_trial = False

    def _pack(
        self,
        packs: Callable[[Tensor], Packing | None],
        expected: Tensor,
        undo: contextlib.ExitStack,
    ) -> None:
        """Packs weights, unless that changes the logits by more than rounding."""
        has_value = self.cache.stores_value
        absorbed = [expansion_weight(m) for n, m in enumerate(self._attentions) if not has_value(n)]
        for mixer in () if self._states is None else self._states.mixers:
            absorbed += mixer.weights_read()
        with contextlib.ExitStack() as trial:
            pack_linears(
                self.model,
                trial,
                lambda w: packs(w) if all(w is not each for each in absorbed) else None,
            )
            if quantised_weights(self.model):
                check_near(self, expected)
                undo.enter_context(trial.pop_all())
                return
            try:
                check_equal(self, expected)
            except ModelRefused as error:
                widened = widened_weights(self.model)
                _log.warning("weights are not packed%s: %s", " in 16 bits" * bool(widened), error)
            else:
                undo.enter_context(trial.pop_all())
                return
        if widened:  # custom code of the model may not work with hidden weights
            self._pack(lambda w: "packed" if packs(w) else None, expected, undo)

    def _switch(self, undo: contextlib.ExitStack) -> None:
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
                carrier=None if self._states is None else self._states.carrier_of(layer),
            )
        for mixer in () if self._states is None else self._states.mixers:
            module = mixer.module
            undo.callback(restore, module, "forward", vars(module).get("forward"))
            module.forward = MethodType(mixer.forward, module)
        for number, module in enumerate(self._attentions):
            if not self.cache.stores_value(number):
                undo.callback(restore, module, "expand_kv", module.__dict__.get("expand_kv"))
                store_latents(module)

    def kernel(self) -> Implementation:
        """Returns the kernel that serves the attention of this model."""
        config = self.model.config.get_text_config()
        capped = bool(getattr(config, "attn_logit_softcapping", None))
        device, dtype = self.model.device.type, self.model.dtype
        head_dim = self.cache.head_dim
        traits = AttentionTraits(device, dtype, (dtype, dtype), head_dim, softcap=capped)
        return choose(traits, DENSE_KERNELS)
