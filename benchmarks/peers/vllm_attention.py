"""vLLM's attention on the CPU, called by itself: needs its environment."""

from __future__ import annotations

from collections.abc import Callable

import torch
from native.scene import DIM, HEADS, KV_HEADS, Scene, Step
from torch import Tensor

from compiled_attn.cache import huge_pages

_BLOCKS_AT_ONCE = 64


class VllmAttention:
    """Its op over its own cache, which holds what the scene's holds, packed by its own write.

    Raises:
        ImportError: vLLM is not here.
    """

    def __init__(self, scene: Scene) -> None:
        from vllm import _custom_ops
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        self._ops = _custom_ops
        self.isa = _get_attn_isa(scene.dtype, scene.block_size, DIM)
        blocks = len(scene.key_cache)
        # Keys and values of a head of a block lie one after the other, as its engine has them.
        cache = huge_pages.zeros((blocks, KV_HEADS, 2 * scene.block_size, DIM), dtype=scene.dtype)
        self._key_cache, self._value_cache = cache.chunk(2, dim=2)
        for start in range(0, blocks, _BLOCKS_AT_ONCE):
            self._write(scene, start, min(start + _BLOCKS_AT_ONCE, blocks))

    def form(self, steps: list[Step]) -> Callable[[int], Tensor]:
        """Attention of each step; planned before, as its engine plans once for all layers."""
        plans = [self._plan(step) for step in steps]
        return lambda i: self._attend(steps[i], plans[i])

    def _write(self, scene: Scene, start: int, end: int) -> None:
        slots = torch.arange(start * scene.block_size, end * scene.block_size)
        key, value = (
            each[start:end].flatten(0, 1) for each in (scene.key_cache, scene.value_cache)
        )
        self._ops.cpu_attn_reshape_and_cache(
            key, value, self._key_cache, self._value_cache, slots, self.isa
        )

    def _plan(self, step: Step) -> Tensor:
        plan: Tensor = self._ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(step.seq_lens),
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            seq_lens=step.seq_lens,
            dtype=step.query.dtype,
            query_start_loc=step.query_start_loc,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=True,
        )
        return plan

    def _attend(self, step: Step, plan: Tensor) -> Tensor:
        out = torch.empty_like(step.query)
        self._ops.cpu_attention_with_kv_cache(
            query=step.query,
            key_cache=self._key_cache,
            value_cache=self._value_cache,
            output=out,
            query_start_loc=step.query_start_loc,
            seq_lens=step.seq_lens,
            scale=DIM**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=step.block_table,
            softcap=0.0,
            scheduler_metadata=plan,
            s_aux=None,
        )
        return out
