"""OpenVINO's PagedAttention on the CPU: a model of one op; runs in an environment with openvino.

Source: ``ov::op::PagedAttentionExtension`` of OpenVINO 2026.4, with its 28 inputs. The op writes
the new tokens of a step itself: as the cache of this signature already holds them, they are read
from it and passed once more.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from compiled_attn.testing.adapters import package
from compiled_attn.testing.capabilities import Capabilities

__all__ = ["CAPABILITIES", "paged_attention"]

CAPABILITIES = Capabilities(
    features=frozenset({"chunked", "mixed", "shared_prefix", "window", "alibi", "sinks"}),
    dtypes=(torch.float32, torch.bfloat16),
    head_dims=(64, 80, 128),
    block_sizes=(32,),
)
_INSTALL = "run in an environment with openvino and torch (pip install openvino torch)"
_INPUTS = (
    "query:2f key:2f value:2f key_cache:4f value_cache:4f past_lens:1i subsequence_begins:1i "
    "block_indices:1i block_indices_begins:1i scale:0f sliding_window:0i alibi_slopes:1f "
    "max_context_len:0i score_aggregation_window:1i rotated_block_indices:1i rotation_deltas:1i "
    "rotation_trig_lut:1f xattention_threshold:1f xattention_block_size:0i xattention_stride:0i "
    "sinks:1f adaptive_rkv_start_size:0i adaptive_rkv_evictable_sizes:1i "
    "adaptive_rkv_diversity_block_set_indices:1i "
    "adaptive_rkv_diversity_block_set_indices_begins:1i token_type_ids:1i qq_bias:1b "
    "qq_bias_begins:1i"
)
"""Name, rank and kind (float, int, byte) of each input."""


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    *,
    window: int | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes ``torch.ops.compiled_attn.paged_attention`` without its log-sum-exp.

    Its blocks have 32 tokens; the caches are copied into ``[blocks, Hk, 32, D]`` and not written.
    """
    _, size, kv_heads, dim = key_cache.shape
    heads, value_dim = query.shape[1], value_cache.shape[3]
    counts = query_start_loc.diff()
    steps = [*zip(block_table.long(), seq_lens.tolist(), counts.tolist(), strict=True)]
    used = [row[: -(-length // size)] for row, length, _ in steps]
    new = [torch.arange(length - count, length) for _, length, count in steps]
    slots = [row[at // size] * size + at % size for row, at in zip(used, new, strict=True)]
    rows = [each.flatten(0, 1)[torch.cat(slots)] for each in (key_cache, value_cache)]
    given = {
        "query": query.flatten(1), "key": rows[0].flatten(1), "value": rows[1].flatten(1),
        "key_cache": key_cache.transpose(1, 2), "value_cache": value_cache.transpose(1, 2),
        "past_lens": seq_lens - counts, "subsequence_begins": query_start_loc,
        "block_indices": torch.cat(used), "scale": torch.tensor(scale),
        "block_indices_begins": torch.tensor([0, *map(len, used)]).cumsum(0),
        "sliding_window": torch.tensor(window or 0), "max_context_len": seq_lens.max(),
    }  # fmt: skip
    if alibi_slopes is not None:
        given["alibi_slopes"] = alibi_slopes
    if sinks is not None:
        given["sinks"] = sinks.view(1, -1, 1, 1)
    kind = "bf16" if query.dtype == torch.bfloat16 else "f32"
    request = _compiled(heads, kv_heads, dim, value_dim, sinks is not None, kind)
    openvino = package("openvino", _INSTALL)
    for port in request.model_inputs:
        value = given.get(port.any_name, torch.zeros([0] * len(port.partial_shape)))
        request.set_tensor(port, _tensor(openvino, value, port.element_type))
    request.infer()
    out = torch.from_numpy(request.get_output_tensor(0).data.copy())
    return out.view(-1, heads, value_dim).to(query.dtype)


def _tensor(openvino: Any, value: Tensor, kind: Any) -> Any:
    if value.is_floating_point():
        value = value.float()
    if kind.get_type_name() == "bf16":  # numpy has none
        tensor = openvino.Tensor(kind, [*value.shape])
        tensor.data.view("int16")[...] = value.bfloat16().contiguous().view(torch.int16).numpy()
        return tensor
    return openvino.Tensor(value.numpy().astype(kind.to_dtype(), order="C"))


@lru_cache(maxsize=64)
def _compiled(
    heads: int, kv_heads: int, dim: int, value_dim: int, has_sinks: bool, kind: str
) -> Any:
    """An infer request of a model with one op, whose caches have this precision."""
    openvino = package("openvino", _INSTALL)
    ops = package("openvino.opset13", _INSTALL)
    types = {"f": openvino.Type.f32, "i": openvino.Type.i32, "b": openvino.Type.u8}
    sizes = {
        "query": (heads * dim,), "key": (kv_heads * dim,), "value": (kv_heads * value_dim,),
        "key_cache": (kv_heads, 32, dim), "value_cache": (kv_heads, 32, value_dim),
    }  # fmt: skip
    parameters = []
    for name, kind_of in (each.split(":") for each in _INPUTS.split()):
        rank, letter = int(kind_of[0]), kind_of[1]
        known = sizes.get(name, ())
        ranks = 4 if name == "sinks" and has_sinks else rank
        shape = [-1] * (ranks - len(known)) + [*known]
        parameters.append(ops.parameter(shape, types[letter], name))
        parameters[-1].output(0).get_tensor().set_names({name})
    op = package("openvino.op", _INSTALL)._PagedAttentionExtension
    node = op([each.output(0) for each in parameters])
    info = {"num_k_heads": kv_heads, "k_head_size": dim}
    info |= {"num_v_heads": kv_heads, "v_head_size": value_dim}
    for key, size in info.items():
        node.get_rt_info()[key] = size
    options = {"KV_CACHE_PRECISION": kind, "INFERENCE_PRECISION_HINT": kind}
    model = openvino.Model([node.output(0)], parameters, "paged_attention")
    return openvino.Core().compile_model(model, "CPU", options).create_infer_request()
