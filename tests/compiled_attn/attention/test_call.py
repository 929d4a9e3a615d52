"""Tensors that unified attention refuses: the message says expected, got, remedy; nothing is
written."""

from __future__ import annotations

import pytest
import torch

from compiled_attn import PagedKVCache, UnifiedAttention, unified_attention
from compiled_attn.attention.sdpa import SdpaKernel
from tests.compiled_attn.attention.unified_call import CACHES, Call, cases
from tests.oracle import LARGEST

INDICES = (
    "slot_mapping", "shared_blocks", "shared_lengths", "unique_blocks", "unique_block_mapping",
    "unique_queries",
)  # fmt: skip
PLACES = ("positions", "shared_starts", "unique_starts")
BIASES = ("causal_bias", "shared_bias", "unique_bias")

SHAPES = {
    "a query without heads": ({"query": lambda x: x[0]}, "expected query "),
    "a batched query": ({"query": lambda x: x.unsqueeze(0)}, r"query \[T, H, D\] of shape"),
    "a key without heads": ({"key": lambda x: x[:, 0]}, "expected key "),
    "a value without heads": ({"value": lambda x: x[:, 0]}, "expected value "),
    "a cache of blocks": ({"key_cache": lambda x: x.unflatten(0, (-1, 4))}, "expected key_cache "),
    "odd heads": ({"query": lambda x: x[:, :3]}, r"H divisible by Hk, got \(3, 2\)"),
    "fewer keys": ({"key": lambda x: x[:-1]}, "expected key .*of shape"),
    "fewer values": ({"value": lambda x: x[:-1]}, "expected value .*of shape"),
    "values of fewer heads": ({"value": lambda x: x[:, :1]}, "expected value .*of shape"),
    "keys of another size": ({"key": lambda x: x[..., :8]}, "expected key .*of shape"),
    "a key cache of another size": ({"key_cache": lambda x: x[..., :8]}, "expected key_cache "),
    "a value cache of fewer heads": ({"value_cache": lambda x: x[:, :1]}, "expected value_cache "),
    "half a block": (
        {"key_cache": lambda x: x[:-2], "key_scale": lambda x: x[:-2]},
        "multiple of block_size 4 slots",
    ),
    "another block size": ({"block_size": 5}, "multiple of block_size 5"),
    "no block size": ({"block_size": 0}, "multiple of block_size 0"),
    "fewer value slots": (
        {"value_cache": lambda x: x[:-4], "value_scale": lambda x: x[:-4]},
        "as many value slots as key slots",
    ),
    "a scale of another cache": ({"key_scale": lambda x: x[:-1]}, "expected key_scale .*of shape"),
    "a scale of the whole token": ({"value_scale": lambda x: x[:, :1]}, "expected value_scale "),
    "slopes of KV heads": ({"alibi_slopes": torch.ones(2)}, "expected alibi_slopes "),
    "a sink for all heads": ({"sinks": torch.ones(1)}, "expected sinks "),
    "a projection without heads": ({"value_projection": torch.ones(16, 8)}, "value_projection "),
    "projection of fewer heads": ({"value_projection": torch.ones(2, 16, 8)}, "value_projection "),
    "projection of half a value": ({"value_projection": torch.ones(4, 8, 8)}, "value_projection "),
}

CACHED = {
    "a quantised cache without its scale": ({"key_scale": None}, "expected key_scale with"),
    "values without their scale": ({"value_scale": None}, "expected value_scale with"),
    "a value without its cache": ({"value_cache": None}, "value and value_cache both"),
    "a cache without its value": ({"value": None}, "value and value_cache both"),
}

DTYPES = {
    "an int query": ({"query": lambda x: x.nan_to_num().int()}, "query of dtype float32 or"),
    "an fp8 query": ({"query": lambda x: x.to(torch.float8_e5m2)}, "query of dtype float32 or"),
    "another key": ({"key": lambda x: x.half()}, "expected key of dtype float32, got float16"),
    "another value": ({"value": lambda x: x.double()}, "value of dtype float32, got float64"),
    "an int cache": ({"key_cache": lambda x: x.int()}, "expected key_cache of dtype float32 or"),
    "a bool cache": ({"value_cache": lambda x: x.bool()}, "value_cache of dtype float32 or"),
    "a cache of another fp8": (
        {"key_cache": lambda x: x.to(torch.float8_e4m3fnuz), "key_scale": None},
        "expected key_cache of dtype float32 or",
    ),
    "a half scale": ({"key_scale": lambda x: x.half()}, "expected key_scale of dtype float32"),
    "an int scale": ({"value_scale": lambda x: x.nan_to_num().int()}, "expected value_scale "),
    "an int causal bias": ({"causal_bias": lambda x: x.isinf().int()}, "expected causal_bias "),
    "an int unique bias": ({"unique_bias": lambda x: x.isinf().int()}, "expected unique_bias "),
    "a query that is no tensor": ({"query": [[[1.0]]]}, "query: expected a tensor"),
    "no query": ({"query": None}, "query: expected a tensor"),
    "no scale": ({"scale": None}, r"scale: expected a number, got NoneType: D \*\* -0.5"),
    "a scale of text": ({"scale": "1"}, "scale: expected a number, got str"),
    "a cap of text": ({"softcap": "1"}, "softcap: expected a number, got str: None is none"),
    "a window of text": ({"sliding_window": "3"}, "sliding_window: expected a number, got str"),
    "sinks that are no tensor": ({"sinks": [0.0] * 4}, "sinks: expected a tensor"),
    **{
        f"float {name}": ({name: lambda x: x.float()}, f"expected {name} of dtype int32 or int64")
        for name in INDICES
    },
    **{
        f"float {name}": (
            {name: lambda x: x.float(), "sliding_window": 3},
            f"expected {name} of dtype int32 or int64",
        )
        for name in PLACES
    },
}

DEVICES = {
    name: ({name: lambda x: x.to("meta")}, f"expected {name} on cpu")
    for name in ("key", "value", *CACHES, *INDICES, *BIASES)
} | {
    "query": ({"query": lambda x: x.to("meta")}, "expected key on meta"),
    "slopes": ({"alibi_slopes": torch.ones(4, device="meta")}, "expected alibi_slopes on cpu"),
    "sinks": ({"sinks": torch.ones(4, device="meta")}, "expected sinks on cpu"),
    "positions": ({"positions": lambda x: x.to("meta"), "sliding_window": 3}, "positions on cpu"),
}


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    cases(ValueError, SHAPES, CACHED, DEVICES) + cases(TypeError, DTYPES),
)
def test_bad_input_is_refused_with_a_remedy_and_writes_nothing(changes, error, match):
    call = Call()
    unified_attention(**Call().arguments)  # legal as it stands
    call.change(changes)
    call.refuses(error, match)


def test_a_scale_is_refused_with_a_cache_of_floats():
    call = Call(cache_dtype=None)
    call.change({"value_scale": torch.ones(256, 2)})
    call.refuses(ValueError, "expected value_scale with a cache of")


def test_the_rank_of_a_projection_of_latents_is_at_most_a_key():
    call = Call(latent=True)
    call.change({"value_projection": torch.ones(4, 17, 8)})
    call.refuses(ValueError, "expected value_projection ")
    call.change({"value_projection": torch.ones(4, 16, 8)})
    assert unified_attention(**call.arguments).shape == (12, 4, 8)


def test_a_scale_for_values_is_refused_without_values():
    call = Call(latent=True)
    call.change({"value_scale": torch.ones(256, 2)})
    call.refuses(ValueError, "expected value_scale only with value_cache")


@pytest.mark.parametrize("dtype", LARGEST)
def test_a_quantised_cache_that_was_converted_with_its_model_is_refused(dtype):
    cache = PagedKVCache(1, 64, 4, 2, 16, dtype=dtype)
    module, call = UnifiedAttention(cache).half(), Call(dtype=torch.float16)
    arguments = call.arguments
    with pytest.raises((ValueError, TypeError), match="key_scale"):
        module(arguments["query"], arguments["key"], arguments["value"], arguments["metadata"])


def test_a_softcap_is_refused_by_a_kernel_without_one():
    query, bias = torch.zeros(1, 1, 8), torch.zeros(1, 1)
    with pytest.raises(ValueError, match="no softcap: choose the kernel with supports"):
        SdpaKernel.attend(query, query, query, bias, scale=1.0, softcap=1.0)


def test_a_module_with_an_unknown_kernel_is_refused_when_it_is_made():
    with pytest.raises(ValueError, match=r"expected a kernel of .*got 'fast': choose one"):
        UnifiedAttention(PagedKVCache(1, 4, 4, 1, 8), kernel="fast")


def test_a_module_of_a_layer_that_does_not_exist_is_refused():
    cache = PagedKVCache(2, 4, 4, 1, 8)
    for layer in (-1, 2):
        with pytest.raises(ValueError, match=r"expected a layer in 0\.\.1"):
            UnifiedAttention(cache, layer)
