"""Unmodified Hugging Face causal language models on the paged cache (extra ``hf``).

`PagedCausalLM` wraps a model so that one call computes a `StepBatch`: the tokens of all requests
flattened to ``[1, T]``, attention over the paged cache instead of a Hugging Face cache, logits only
where wanted. The model's own code runs; only its attention function is ours, through
`transformers.AttentionInterface`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from compiled_attn.batch import StepBatch, TableBatch
from compiled_attn.cache import PagedKVCache
from compiled_attn.kernels import AttendRequest, Kernel, choose
from compiled_attn.kernels.native import KernelChoice
from compiled_attn.unified import UnifiedMetadata, unified_attention

__all__ = ["ATTENTION_NAME", "PagedCausalLM", "PagedStep", "cache_for", "paged_attention_forward"]

ATTENTION_NAME = "compiled_attn"
"""Name of our attention in `transformers.AttentionInterface`."""

_CAUSAL_WIDTH = 256
_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class PagedStep:
    """What every layer's attention needs of a step: handed to the model as the keyword ``paged``.

    The metadata of each window that the model's layers use is made once a step, for all layers; the
    native kernel takes the window itself, and the same metadata for all.
    """

    cache: PagedKVCache
    by_window: dict[int | None, UnifiedMetadata]
    seen_layers: set[int] | None = None
    kernel: KernelChoice = "portable"

    @staticmethod
    def of(cache: PagedKVCache, metadata: UnifiedMetadata, windows: tuple[int, ...]) -> PagedStep:
        """The step with its metadata seen through each of the windows."""
        return PagedStep(cache, {None: metadata, **{w: metadata.windowed(w) for w in windows}})

    @staticmethod
    def native(cache: PagedKVCache, metadata: UnifiedMetadata) -> PagedStep:
        """The step for the native kernel, of metadata that is request by request."""
        return PagedStep(cache, {None: metadata}, kernel="native")

    def seen_through(self, window: int | None) -> tuple[UnifiedMetadata, int | None]:
        """The metadata for layers of a window, and the window if the metadata is without it."""
        if self.kernel == "native":
            return self.by_window[None], window
        return self.by_window[window], None


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    paged: PagedStep | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as `transformers.AttentionInterface` calls it.

    Args:
        module: the layer's attention module; its ``layer_idx`` names the layer of the cache.
        query: ``[1, H, T, D]``, after rotary embedding; key, value: ``[1, Hk, T, D]``.
        attention_mask: must be None; who sees what is in ``paged``.
        scaling, dropout, sliding_window, softcap, s_aux: as the model passes them.
        paged: the step.

    Returns:
        ``[1, T, H, D]`` and None (no attention weights).

    Raises:
        ValueError: no ``paged`` keyword, a mask, dropout, or a batch that is not flattened.
    """
    if paged is None:
        raise ValueError(
            f"attention {ATTENTION_NAME!r} expected the keyword paged=PagedStep(...), got none: "
            "call the model through compiled_attn.hf.PagedCausalLM, or set another attention"
        )
    if attention_mask is not None or dropout or query.shape[0] != 1:
        raise ValueError(
            f"attention {ATTENTION_NAME!r} expected a flattened [1, T] batch in eval mode without "
            f"a mask, got batch {query.shape[0]}, dropout {dropout}, "
            f"mask {attention_mask is not None}"
        )
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if paged.seen_layers is not None:
        paged.seen_layers.add(layer)
    request = AttendRequest(query.device.type, query.dtype, query.shape[-1], bool(softcap))
    metadata, window = paged.seen_through(sliding_window)
    out = unified_attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        paged.cache.key(layer),
        paged.cache.value(layer),
        scaling,
        metadata,
        sliding_window=window,
        softcap=softcap,
        sinks=s_aux,
        key_scale=paged.cache.key_scale(layer),
        value_scale=paged.cache.value_scale(layer),
        attend=choose(request).attend,
        kernel=paged.kernel,
        fused_write=False,  # a layer is a region
    )
    assert isinstance(out, Tensor)
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


class PagedCausalLM(nn.Module):
    """A Hugging Face causal LM whose forward is one engine step over a `PagedKVCache`.

    Args:
        model: any causal LM of transformers whose attention goes through `AttentionInterface`;
            its attention implementation is switched to ours, and each decoder layer is marked as a
            region that a graph compiles once.
        cache: the paged cache, see `cache_for`.
        is_native: whether steps are `TableBatch`es for the native kernel, or `StepBatch`es.

    Raises:
        ValueError: a layer does not attend through `AttentionInterface` (recurrent or convolution
            layers, chunked attention, attention code of the model's own).

    Shape:
        - forward(``*StepBatch``, or ``*TableBatch`` if native) -> logits ``[L, vocab]`` of the
          rows ``logits_index``
    """

    def __init__(
        self, model: PreTrainedModel, cache: PagedKVCache, *, is_native: bool = False
    ) -> None:
        super().__init__()
        self.is_native = is_native
        self.model = model.eval()
        self.cache = cache
        self.windows = _windows(model)
        model.set_attn_implementation(ATTENTION_NAME)
        self._check_every_layer_is_paged()
        for layer in _decoder_layers(model):
            _compile_once_for_all(layer)

    def forward(self, *inputs: Tensor | None) -> Tensor:
        """Computes a step: the fields of its batch in order, to logits ``[L, vocab]``."""
        step = self._batch(*inputs)
        logits: Tensor = self.model(
            input_ids=step.input_ids.unsqueeze(0),
            position_ids=step.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=step.logits_index,
            paged=self._paged(step),
        ).logits
        return logits[0]

    def _batch(self, *inputs: Tensor | None) -> StepBatch | TableBatch:
        kind = TableBatch if self.is_native else StepBatch
        return kind(*inputs)  # type: ignore[arg-type]

    def _paged(self, step: StepBatch | TableBatch) -> PagedStep:
        if isinstance(step, TableBatch):
            return PagedStep.native(self.cache, step.metadata(self.cache.block_size))
        metadata = step.metadata(self.cache.block_size, _CAUSAL_WIDTH)
        return PagedStep.of(self.cache, metadata, self.windows)

    def _check_every_layer_is_paged(self) -> None:
        """Runs one token of padding: a layer with attention of its own would mix requests up."""
        config = self.model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
        missing = [] if kinds else sorted(set(range(config.num_hidden_layers)) - self._probe())
        if kinds or missing:
            raise ValueError(
                f"expected a model whose layers all attend through transformers' "
                f"AttentionInterface, got {type(self.model).__name__} with "
                f"{f'layers of type {sorted(kinds)}' if kinds else f'other layers {missing}'}: "
                "it cannot run on the paged cache"
            )

    def _probe(self) -> set[int]:
        """Layers whose attention was ours in a step of one token of padding."""
        sizes = {"tokens": 1, "shared": 0, "unique": 0, "logits": 1, "requests": 1}
        step = TableBatch.padding(sizes, 1) if self.is_native else StepBatch.padding(sizes)
        seen: set[int] = set()
        try:
            with torch.no_grad():
                self.model(
                    input_ids=step.input_ids.unsqueeze(0).to(self.model.device),
                    position_ids=step.positions.unsqueeze(0).to(self.model.device),
                    use_cache=False,
                    paged=replace(self._paged(step), seen_layers=seen),
                )
        except Exception as error:
            raise ValueError(
                "expected a model that computes a flattened step, got a "
                f"{type(self.model).__name__}, which fails on one token: "
                f"{type(error).__name__}: {error}"
            ) from error
        return seen

    def kernel(self) -> Kernel:
        """The kernel that the model's attention chooses."""
        config = self.model.config.get_text_config()
        capped = bool(getattr(config, "attn_logit_softcapping", None))
        weight = next(self.model.parameters())
        return choose(AttendRequest(weight.device.type, weight.dtype, self.cache.head_dim, capped))


def cache_for(
    model: PreTrainedModel, num_blocks: int, block_size: int, *, dtype: torch.dtype | None = None
) -> PagedKVCache:
    """A `PagedKVCache` with the layers, heads and head size of a Hugging Face model.

    Raises:
        ValueError: the sizes are too small, or the model's configuration names no attention heads.
    """
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        raise ValueError(
            f"expected a model with attention heads, got {type(model).__name__}: "
            "its configuration has no num_attention_heads"
        )
    weight = next(model.parameters())
    return PagedKVCache(
        config.num_hidden_layers,
        num_blocks,
        block_size,
        getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=dtype or weight.dtype,
        device=weight.device,
    )


def _decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated layers of the decoder: none where the model has no list of that length."""
    count = model.config.get_text_config().num_hidden_layers
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    return next(([*layers] for layers in lists if len(layers) == count), [])


def _compile_once_for_all(layer: nn.Module) -> None:
    """Lets a graph that contains the layer compile it once for all layers that are alike."""
    layer.forward = MethodType(_layer_region, layer)


def _layer_forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


_layer_region = torch.compiler.nested_compile_region(_layer_forward)


def _windows(model: PreTrainedModel) -> tuple[int, ...]:
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    return (window,) if window else ()
