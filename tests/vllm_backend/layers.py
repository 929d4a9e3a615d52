"""Attention of each layer of a model in vLLM: our kernel and its own against float64.

    VLLM_PYTHON tests/vllm_backend/layers.py MODEL '{"dtype": "bfloat16"}' PROMPTS_JSON NEW

While our kernel serves, each layer's call is computed again: by vLLM's kernel over the same cache,
and as softmax in float64 over the same keys and values. The last line of stdout is JSON: by layer
the root mean square errors of both and of float64 rounded to the dtype, over the root mean square
of what is expected, and the largest errors.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_KINDS = ("ours", "theirs", "rounded")


class Errors:
    """Errors of each layer, summed over steps."""

    def __init__(self) -> None:
        self.squares = dict.fromkeys((*_KINDS, "expected"), 0.0)
        self.largest = dict.fromkeys(_KINDS, 0.0)

    def add(self, expected: Tensor, found: dict[str, Tensor]) -> None:
        """The outputs of one call, ``[tokens, heads, dim]`` each."""
        self.squares["expected"] += float(expected.square().sum())
        for name, out in found.items():
            wrong = out.double().view_as(expected) - expected
            self.squares[name] += float(wrong.square().sum())
            self.largest[name] = max(self.largest[name], float(wrong.abs().max()))

    def summary(self) -> dict[str, Any]:
        relative = {n: (self.squares[n] / self.squares["expected"]) ** 0.5 for n in _KINDS}
        return {"relative": relative, "largest": self.largest}


def expected(impl: Any, query: Tensor, kv_cache: Tensor, step: Any) -> Tensor:
    """Causal softmax in float64 over the cache: ``[tokens, heads, dim]``."""
    from compiled_attn.contrib.vllm.backend import cache_views

    parts = []
    starts = step.query_start_loc.tolist()
    for row, length in enumerate(step.seq_lens.tolist()):
        blocks = step.block_table[row].long()
        k, v = (
            view[blocks].flatten(0, 1)[:length].double().repeat_interleave(
                impl.num_queries_per_kv, 1
            )
            for view in cache_views(kv_cache)
        )  # fmt: skip
        q = query[starts[row] : starts[row + 1]].double()
        scores = torch.einsum("qhd,khd->hqk", q, k) * impl.scale
        ahead = torch.arange(length) > torch.arange(length - len(q), length)[:, None]
        parts.append(
            torch.einsum("hqk,khd->qhd", scores.masked_fill(ahead, -torch.inf).softmax(-1), v)
        )
    return torch.cat(parts)


def theirs(impl: Any, layer: Any, query: Tensor, kv_cache: Tensor, step: Any) -> Tensor:
    """vLLM's kernel over the same keys and values, which its own write packs as it reads them."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from compiled_attn.contrib.vllm.backend import cache_views

    used, table = step.block_table.long().unique(return_inverse=True)
    own_cache = torch.zeros_like(kv_cache[used])
    key, value = (view[used].flatten(0, 1).contiguous() for view in cache_views(kv_cache))
    impl.do_kv_cache_update(layer, key, value, own_cache, torch.arange(len(key)))
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(step.seq_lens), num_heads=impl.num_heads, num_kv_heads=impl.num_kv_heads,
        head_dim=impl.head_size, seq_lens=step.seq_lens, dtype=query.dtype,
        query_start_loc=step.query_start_loc, causal=True, sliding_window_size=-1,
        isa=layer.isa, enable_kv_split=True, kv_cache_dtype=impl.kv_cache_dtype,
    )  # fmt: skip
    changed = {"block_table": table.to(torch.int32), "scheduler_metadata": plan}
    own = SimpleNamespace(**{**vars(step), **changed})
    out = torch.empty_like(query)
    CPUAttentionBackendImpl.forward(impl, layer, query, None, None, own_cache, own, out)
    return out


def watch(found: dict[str, Errors]) -> None:
    """Recompute each call of our kernel in two other ways."""
    from compiled_attn.contrib.vllm.backend import PagedAttentionImpl

    attend = PagedAttentionImpl._attend

    def attend_and_compare(
        self: Any, layer: Any, query: Tensor, key: Any, value: Any, kv_cache: Tensor, step: Any,
        output: Tensor,
    ) -> None:  # fmt: skip
        attend(self, layer, query, key, value, kv_cache, step, output)
        tokens = step.num_actual_tokens
        rows = query[:tokens].view(tokens, self.num_heads, self.head_size)
        exact = expected(self, rows, kv_cache, step)
        outputs = {
            "ours": output[:tokens],
            "theirs": theirs(self, layer, rows, kv_cache, step),
            "rounded": exact.to(query.dtype),
        }
        found.setdefault(layer.layer_name, Errors()).add(exact, outputs)

    PagedAttentionImpl._attend = attend_and_compare


def main() -> None:
    os.environ["COMPILED_ATTN_VLLM"] = "1"
    from vllm import LLM, SamplingParams

    found: dict[str, Errors] = {}
    watch(found)
    folder, options, prompts, new = sys.argv[1], *map(json.loads, sys.argv[2:5])
    defaults = {"kv_cache_memory_bytes": 2**28, "enforce_eager": True, "skip_tokenizer_init": True}
    llm = LLM(folder, **{**defaults, **options})
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    llm.generate(requests, sampling, use_tqdm=False)
    print(json.dumps({name: errors.summary() for name, errors in found.items()}))


if __name__ == "__main__":
    main()
