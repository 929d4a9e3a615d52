"""The trial of a model: its logits through the paged cache must equal its own.

It finds model code that does not work with another attention: positions that the model counts
itself, state between tokens, a second call with other values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compiled_attn.cache.kv_cache import PagedKVCache
from compiled_attn.errors import ModelRefused
from compiled_attn.models.hf.refused import plain_attention, refused
from compiled_attn.step import BatchBuilder, Request, StepLayout

__all__ = ["TriedModel", "check_equal", "check_near", "plain_logits", "small_cache", "step_logits"]

# Most rows of the second step also read what the first step wrote.
_STEPS = ((0, 2), (2, 6))
_TABLES = ([3, 1], [2, 4])
_BLOCK_SIZE, _NUM_BLOCKS, _LENGTH = 4, 5, 6

_ROUNDING = {torch.float16: 0.1, torch.bfloat16: 0.3}
_SINGLE = 1e-3
"""Maximum difference of the logits of a row, relative to their spread: far above the rounding of
many layers (norms and rotations are float32 in float64 models too) or a near tie of experts; far
below the effect of wrong keys, positions or neighbours, which is about 1."""
_QUANTISED = 0.5
"""Maximum median difference for a quantised cache or quantised weights."""


class TriedModel(Protocol):
    """What the trial needs of `PagedCausalLM`."""

    model: PreTrainedModel
    cache: PagedKVCache
    layout: StepLayout

    def compute(self, step: Any, cache: PagedKVCache) -> Tensor:
        """Computes a step over a cache to logits ``[L, vocab]``."""


def small_cache(
    cache: PagedKVCache, num_blocks: int, block_size: int, dtype: torch.dtype
) -> PagedKVCache:
    """Returns a cache of the same layers with other sizes and dtype."""
    return PagedKVCache(
        cache.num_layers,
        num_blocks,
        block_size,
        cache.num_kv_heads,
        cache.head_dim,
        dtype=dtype,
        device=cache.key(0).device,
        shapes=cache.shapes,
    )


def step_logits(paged: TriedModel, cache: PagedKVCache, requests: Sequence[Request]) -> Tensor:
    """Returns logits ``[L, vocab]`` of one step of requests, in the layout of the model's steps."""
    width = max(len(request.block_table) for request in requests)
    layout = paged.layout.over(cache.num_blocks, cache.block_size, width)
    plan = layout.plan(BatchBuilder(cache.num_blocks, cache.block_size).rows_of(requests))
    step: Any = plan.fill()
    device = cache.key(0).device
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
        words = f"{type(error).__name__}: {error}".splitlines()[0]
        raise refused(model, f"that fails by itself on {_LENGTH} tokens ({words})") from error
    if not logits.isfinite().all():
        raise refused(model, f"whose logits are not finite on {_LENGTH} random tokens")
    return logits


def check_equal(paged: TriedModel, expected: Tensor, *, last_only: bool = False) -> None:
    """Raises ModelRefused unless steps over a paged cache give the logits ``[2, 6, vocab]``.

    ``last_only``: only the last token of each request needs logits, in each step.

    A quantised cache is tried after one of the model's own dtype, so that its larger rounding does
    not hide a mistake.
    """
    distance = _distances(*_through(paged, expected.dtype, expected, last_only)).max().item()
    if not distance <= (bound := _ROUNDING.get(expected.dtype, _SINGLE)):
        raise ModelRefused(
            f"expected a model with the same logits through the paged cache as by itself, got a "
            f"{type(paged.model).__name__} that computes others: they differ by {distance:.1e} of "
            f"their spread, more than {bound:.0e}"
        )
    if not paged.cache.is_quantised:
        return
    dtype = paged.cache.dtype
    distance = _distances(*_through(paged, dtype, expected, last_only)).median().item()
    if not distance <= _QUANTISED:
        raise ModelRefused(
            f"expected a model that tolerates keys and values in {dtype}, got a "
            f"{type(paged.model).__name__} whose logits change by {distance:.1e} of their "
            f"spread, more than {_QUANTISED:.0e}: use its own dtype (kv_dtype 'auto')"
        )


def check_near(paged: TriedModel, expected: Tensor) -> None:
    """Raises ModelRefused unless quantised weights give logits close to ``[2, 6, vocab]``."""
    distance = _distances(*_through(paged, expected.dtype, expected)).median().item()
    if not distance <= _QUANTISED:
        raise ModelRefused(
            f"expected a model that tolerates weights of int8, got a {type(paged.model).__name__} "
            f"whose logits change by {distance:.1e} of their spread, more than "
            f"{_QUANTISED:.0e}: use weights 'auto'"
        )


def _through(
    paged: TriedModel, dtype: torch.dtype, expected: Tensor, last_only: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns logits ``[L, vocab]`` of two steps over a small cache, and the expected ones."""
    actual, plain = [], []
    cache = small_cache(paged.cache, _NUM_BLOCKS, _BLOCK_SIZE, dtype)
    prompts = _prompts(paged.model).tolist()
    try:
        for start, end in _STEPS:
            first = end - 1 if last_only else start
            requests = [
                Request(prompt[start:end], start, table, num_logits=end - first)
                for prompt, table in zip(prompts, _TABLES, strict=True)
            ]
            actual.append(step_logits(paged, cache, requests))
            plain.append(expected[:, first:end].flatten(0, 1))
        given, compared = torch.cat(actual), torch.cat(plain)
        if given.shape != compared.shape:
            raise ValueError(f"logits {[*given.shape]} instead of {[*compared.shape]}")
    except Exception as error:
        words = f"{type(error).__name__}: {error}".splitlines()[0]
        raise refused(paged.model, f"that fails on a flattened step ({words})") from error
    return given, compared


def _distances(actual: Tensor, expected: Tensor) -> Tensor:
    """Difference of each row, relative to its spread."""
    rows, plain = actual.double(), expected.double()
    spread = (plain - plain.mean(-1, keepdim=True)).norm(dim=-1)
    distances: Tensor = (rows - plain).norm(dim=-1) / spread.clamp_min(1e-30)
    return distances


def _prompts(model: PreTrainedModel) -> Tensor:
    """Two prompts of random tokens, ``[2, 6]``, equal in every call."""
    vocab = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(3, vocab - 1), vocab, (len(_TABLES), _LENGTH), generator=generator)
    return ids.to(model.device)
