"""Fakes of FlashAttention's libraries for machines without a device, and calls for them.

Like the libraries the fakes do not write rows of no sequence, return +inf as the lse of rows
without keys, and have heads first in the lse.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_attn.ops.call import NewTokens, PagedCall
from compiled_attn.ops.providers import flash, library, varlen
from tests.compiled_attn.ops.native_cases import CASES
from tests.compiled_attn.ops.native_scene import Scene, new_tokens

BF16 = torch.bfloat16

LACKS: dict[str, tuple[dict[str, Any], str]] = {
    "sinks": ({"sinks": torch.zeros(4)}, "has no sinks"),
    "ALiBi and sinks": (
        {"alibi_slopes": torch.ones(4), "sinks": torch.zeros(4)}, "has no ALiBi and no sinks"
    ),
    "float32": ({"dtype": torch.float32}, "not in torch.float32"),
    "codes": ({"cache_dtype": torch.int8}, "no cache of torch.int8"),
    "a large head": ({"dim": 576}, "up to 256, not 576"),
    "an odd head": ({"dim": 84}, "that 8 divides, up to 256, not 84"),
    "smaller values": ({"dim": 64, "value_dim": 32}, "head size of keys, 64, not 32"),
}  # fmt: skip
"""Options of a scene that no FlashAttention supports, and the reason."""


def cases() -> dict[str, dict[str, Any]]:
    """The cases of the op, those in float32 in bfloat16."""
    float32 = torch.float32
    return {
        name: case | {"dtype": BF16 if case.get("dtype", float32) == float32 else case["dtype"]}
        for name, case in CASES.items()
    }


def written(step: Scene) -> PagedCall:
    """The call of a step whose new tokens are also given, as the op has it after it wrote them."""
    key, value, slots = new_tokens(step)
    for cache, rows in ((step.key_cache, key), (step.value_cache, value)):
        size = cache.shape[1]
        cache[slots // size, slots % size] = rows
    return step.call._replace(new=NewTokens(key, value, slots))


def on_device(call: PagedCall) -> PagedCall:
    """The call with its tensors on a CUDA device."""
    moved = {k: v.cuda() for k, v in call._asdict().items() if isinstance(v, torch.Tensor)}
    new = None if call.new is None else NewTokens(*(each.cuda() for each in call.new))
    return call._replace(**moved, new=new)


def as_if_cuda(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    """As if the tensors of the tests were on a device."""
    monkeypatch.setattr(flash, "lacks_device", lambda device: None)
    monkeypatch.setattr(flash, "capability", lambda device: capability)


def install_varlen(monkeypatch: Any, function: Any = None, active: str | None = "FA3") -> None:
    """Lets torch have a function, and an implementation of flash attention."""
    function = function or varlen_attn
    module = SimpleNamespace(varlen_attn=function, current_flash_attention_impl=lambda: active)
    module.AuxRequest = lambda lse: SimpleNamespace(lse=lse)
    monkeypatch.setattr(varlen, "import_module", lambda name: module)


def install_libraries(
    monkeypatch: pytest.MonkeyPatch, kvcache: Any = None, context: Any = None
) -> None:
    """As if FlashAttention 3 and FlashInfer were installed, or with other functions."""
    attention = SimpleNamespace(flash_attn_with_kvcache=kvcache or flash_attn_with_kvcache)
    infer = SimpleNamespace(
        trtllm_batch_context_with_kv_cache=context or trtllm_batch_context_with_kv_cache
    )
    monkeypatch.setitem(sys.modules, "flash_attn_interface", attention)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(prefill=infer))
    monkeypatch.setitem(sys.modules, "flashinfer.prefill", infer)
    library._load.cache_clear()


def no_paged(call: PagedCall) -> Any:
    raise AssertionError("expected no call of Triton's kernel")


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """That of torch, as which flash attention has no softcap."""
    if not enable_gqa and query.shape[1] != key.shape[-2]:
        raise ValueError("Expect query and key/value to have the same number of heads")
    if block_table is not None:
        assert seqused_k is not None and cu_seq_k is None
        rows = paged_rows(key, value, block_table, seqused_k)
        assert int(seqused_k.max()) <= max_k
    else:
        assert seqused_k is None and cu_seq_k is not None and key.dim() == 3

        def rows(sequence: int) -> tuple[Tensor, Tensor]:
            own = slice(*cu_seq_k[sequence : sequence + 2].tolist())
            return key[own], value[own]

        assert int(cu_seq_k.diff().max()) <= max_k
    assert num_splits is None and int(cu_seq_q.diff().max()) <= max_q
    out, lse = _attention(query, cu_seq_q, rows, scale or 1.0, window_size)
    return (out, lse) if return_aux is not None and return_aux.lse else out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> tuple[Tensor, ...]:
    """That of FlashAttention 3; returns what the splits had too."""
    assert return_softmax_lse and k is v is None and num_splits == 0
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    window = (window_size[0], 0) if causal else window_size
    rows = paged_rows(k_cache, v_cache, page_table, cache_seqlens)
    return *_attention(q, cu_seqlens_q, rows, softmax_scale or 1.0, window, softcap), None, None


def trtllm_batch_context_with_kv_cache(
    query: Tensor,
    kv_cache: tuple[Tensor, Tensor],
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float,
    bmm2_scale: float,
    batch_size: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    window_left: int = -1,
    kv_layout: str = "HND",
    causal: bool = True,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """That of FlashInfer, whose lse has base 2 and tokens first."""
    assert kv_layout == "NHD" and return_lse and bmm2_scale == 1.0
    assert batch_size == len(seq_lens) == len(cum_seq_lens_q) - 1
    assert cum_seq_lens_kv.diff().equal(seq_lens) and cum_seq_lens_kv.dtype == torch.int32
    assert int(cum_seq_lens_q.diff().max()) <= max_q_len and int(seq_lens.max()) <= max_kv_len
    rows = paged_rows(*kv_cache, block_tables, seq_lens)
    window = (window_left, 0 if causal else -1)
    out, lse = _attention(query, cum_seq_lens_q, rows, bmm1_scale, window)
    return out, lse.t() / math.log(2.0)


Rows = Callable[[int], tuple[Tensor, Tensor]]
"""Keys and values of a sequence."""


def paged_rows(key: Tensor, value: Tensor, table: Tensor, used: Tensor) -> Rows:
    assert key.shape == value.shape
    for ints in (used, table):
        assert ints.dtype == torch.int32 and ints.stride(-1) == 1

    def rows(sequence: int) -> tuple[Tensor, Tensor]:
        seen = torch.arange(int(used[sequence]))
        pages = table[sequence, seen // key.shape[1]].long(), seen % key.shape[1]
        return key[pages], value[pages]

    return rows


def _attention(
    query: Tensor,
    starts: Tensor,
    rows: Rows,
    scale: float,
    window: tuple[int, int],
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    _, heads, dim = query.shape
    assert query.dtype in (torch.float16, BF16) and dim % 8 == 0 and dim <= 256
    assert starts.dtype == torch.int32 and query.stride(-1) == 1
    out = torch.full_like(query, torch.nan)
    lse = torch.full((heads, len(query)), torch.nan)
    for sequence in range(len(starts) - 1):
        begin, end = starts[sequence : sequence + 2].tolist()
        key, value = rows(sequence)
        assert key.dtype == value.dtype == query.dtype and key.shape[-1] == dim
        assert key.stride(-1) == value.stride(-1) == 1
        key, value = (
            each.double().repeat_interleave(heads // each.shape[1], 1) for each in (key, value)
        )
        scores = torch.einsum("qhd,khd->hqk", query[begin:end].double(), key) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        at = len(key) - (end - begin) + torch.arange(end - begin)[:, None]
        seen, (left, right) = torch.arange(len(key)), window
        if left >= 0:
            scores.masked_fill_(seen < at - left, -math.inf)
        if right >= 0:
            scores.masked_fill_(seen > at + right, -math.inf)
        total = scores.logsumexp(-1)
        weights = (scores - torch.where(total.isinf(), 0.0, total)[..., None]).exp()
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)
        lse[:, begin:end] = torch.where(total.isneginf(), math.inf, total).float()
    return out, lse
