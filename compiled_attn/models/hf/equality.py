"""The trial of a model: its logits through the paged cache must equal its own.

It finds model code that does not work with another attention: positions that the model counts
itself, state between tokens, a second call with other values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compiled_attn.cache.kv_cache import PagedKVCache
from compiled_attn.cache.state_cache import StateCache
from compiled_attn.errors import ModelRefused
from compiled_attn.models.hf.refusal import failure, plain_attention, refusal
from compiled_attn.models.packed import quantised_formats
from compiled_attn.ops.packed_linear import BITS_OF
from compiled_attn.step import BatchBuilder, Request, StepLayout

__all__ = ["TriedModel", "check_equal", "check_near", "plain_logits", "small_cache", "step_logits"]

# Most rows of the second step also read what the first step wrote.
_STEPS = ((0, 2), (2, 6))
_TABLES = ([3, 1], [2, 4])
# With states also a single token, and tokens after it; then the same in each other's slots.
_STATE_STEPS = ((0, 2), (2, 3), (3, 6))
_STATE_SLOTS = ((2, 1), (1, 2))
_BLOCK_SIZE, _NUM_BLOCKS, _LENGTH = 4, 5, 6

_ROUNDING = {torch.float16: 0.1, torch.bfloat16: 0.3}
_SINGLE = 1e-3
"""Maximum difference of the logits of a row, relative to their spread: far above the rounding of
many layers (norms and rotations are float32 in float64 models too) or a near tie of experts; far
below the effect of wrong keys, positions or neighbours, which is about 1."""
_QUANTISED = 0.5
"""Maximum median difference for a quantised cache or weights of 8 bits."""
_FOUR_BITS = 1.0
"""That for weights rounded to 4 bits: 0.7 to 0.8 for SmolLM2-135M, 1.4 for unrelated logits."""


class TriedModel(Protocol):
    """What the trial needs of `PagedCausalLM`."""

    model: PreTrainedModel
    cache: PagedKVCache
    layout: StepLayout

    def compute(self, step: Any, cache: PagedKVCache) -> Tensor:
        """Computes a step over a cache to logits ``[L, vocab]``."""


def small_cache(
    cache: PagedKVCache,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    num_slots: int = 2,
) -> PagedKVCache:
    """Returns a cache of the same layers with other sizes and dtype; ``num_slots``: of states."""
    device = next(cache.buffers()).device
    states = None
    if cache.states is not None:
        states = StateCache(cache.states.shapes, num_slots, device)
    return PagedKVCache(
        cache.num_layers,
        num_blocks,
        block_size,
        cache.num_kv_heads,
        cache.head_dim,
        dtype=dtype,
        device=device,
        shapes=cache.shapes,
        states=states,
    )


def step_logits(paged: TriedModel, cache: PagedKVCache, requests: Sequence[Request]) -> Tensor:
    """Returns logits ``[L, vocab]`` of one step of requests, in the layout of the model's steps."""
    width = max(len(request.block_table) for request in requests)
    layout = paged.layout.over(cache.num_blocks, cache.block_size, width)
    plan = layout.plan(BatchBuilder(cache.num_blocks, cache.block_size).rows_of(requests))
    step: Any = plan.fill()
    device = next(cache.buffers()).device
    moved = type(step)(*(None if field is None else field.to(device) for field in step))
    with torch.no_grad():
        return paged.compute(moved, cache)


def plain_logits(model: PreTrainedModel) -> Tensor:
    """Returns logits ``[2, 6, vocab]`` of the two prompts, by the model with eager attention.

    Raises:
        ModelRefused: it fails, or logits are not finite.
    """
    try:
        with plain_attention(model, "eager"), torch.no_grad():
            logits: Tensor = model(input_ids=_prompts(model), use_cache=False).logits
    except Exception as error:
        raise failure(model, f"by itself on {_LENGTH} tokens", error) from error
    if not logits.isfinite().all():
        raise refusal(model, f"whose logits are not finite on {_LENGTH} random tokens")
    return logits


def check_equal(paged: TriedModel, expected: Tensor, *, last_only: bool = False) -> None:
    """Raises ModelRefused unless steps over a paged cache give the logits ``[2, 6, vocab]``.

    ``last_only``: only the last token of each request needs logits, in each step.

    A quantised cache is tried after one of the model's own dtype, so that its larger rounding does
    not hide a mistake.
    """
    distance = _distances(paged, expected.dtype, expected, last_only).max().item()
    dtypes = expected.dtype, paged.model.dtype  # of logits, which some models return in float32
    if not distance <= (bound := max(_ROUNDING.get(dtype, _SINGLE) for dtype in dtypes)):
        raise ModelRefused(
            f"expected a model with the same logits through the paged cache as by itself, got a "
            f"{type(paged.model).__name__} that computes others: they differ by {distance:.1e} of "
            f"their spread, more than {bound:.0e}"
        )
    if paged.cache.is_quantised:
        dtype = paged.cache.dtype
        distances = _distances(paged, dtype, expected, last_only)
        remedy = "use its own dtype (kv_dtype 'auto')"
        _check_median(paged, distances, f"keys and values in {dtype}", remedy)


def check_near(paged: TriedModel, expected: Tensor) -> None:
    """Raises ModelRefused unless quantised weights give logits close to ``[2, 6, vocab]``."""
    distances = _distances(paged, expected.dtype, expected)
    has_four = any(BITS_OF.get(each) == 4 for each in quantised_formats(paged.model))
    bound = _FOUR_BITS if has_four else _QUANTISED
    _check_median(paged, distances, "quantised weights", "use weights 'auto'", bound)


def _check_median(
    paged: TriedModel, distances: Tensor, what: str, remedy: str, bound: float = _QUANTISED
) -> None:
    if not (distance := distances.median().item()) <= bound:
        raise ModelRefused(
            f"expected a model that tolerates {what}, got a {type(paged.model).__name__} whose "
            f"logits change by {distance:.1e} of their spread, more than {bound:.0e}: {remedy}"
        )


def _distances(
    paged: TriedModel, dtype: torch.dtype, expected: Tensor, last_only: bool = False
) -> Tensor:
    """Returns how far each row of logits of the steps over a small cache is from the expected."""
    actual, plain = [], []
    cache = small_cache(paged.cache, _NUM_BLOCKS, _BLOCK_SIZE, dtype, 1 + len(_TABLES))
    prompts = _prompts(paged.model).tolist()
    has_states = cache.states is not None
    try:
        for slots in _STATE_SLOTS if has_states else ((0, 0),):
            if cache.states is not None:
                cache.states.fill_(math.nan)  # a new request does not read its slot
            for start, end in _STATE_STEPS if has_states else _STEPS:
                first = end - 1 if last_only else start
                requests = [
                    Request(prompt[start:end], start, table, end - first, state_slot=slot)
                    for prompt, table, slot in zip(prompts, _TABLES, slots, strict=True)
                ]
                actual.append(step_logits(paged, cache, requests))
                plain.append(expected[:, first:end].flatten(0, 1))
        given, compared = torch.cat(actual), torch.cat(plain)
        if given.shape != compared.shape:
            raise ValueError(f"logits {[*given.shape]} instead of {[*compared.shape]}")
    except Exception as error:
        raise failure(paged.model, "on a flattened step", error) from error
    # The difference of each row, relative to its spread.
    rows, plain_rows = given.double(), compared.double()
    spread = (plain_rows - plain_rows.mean(-1, keepdim=True)).norm(dim=-1)
    distances: Tensor = (rows - plain_rows).norm(dim=-1) / spread.clamp_min(1e-30)
    return distances


def _prompts(model: PreTrainedModel) -> Tensor:
    """Two prompts of random tokens, ``[2, 6]``, equal in every call."""
    vocab = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(3, vocab - 1), vocab, (len(_TABLES), _LENGTH), generator=generator)
    return ids.to(model.device)
