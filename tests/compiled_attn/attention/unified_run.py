"""Runs a scene through unified attention, and says what must hold of the result."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_attn import BatchBuilder, Request, UnifiedMetadata, unified_attention
from compiled_attn.step import StepPlan
from tests.oracle import Scene

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}
"""One token too many or too few moves an output by far more; `test_unified_numerics` bounds the
rounding itself."""


class StepResult(NamedTuple):
    """out ``[T, H, Dv]`` and lse ``[T, H]`` of the real tokens, and of the padding after them."""

    out: Tensor
    lse: Tensor
    padded_out: Tensor
    padded_lse: Tensor


def plan_of(scene: Scene) -> StepPlan:
    return BatchBuilder(scene.shape.num_blocks, scene.shape.block_size).plan(scene.requests)


def metadata_of(
    scene: Scene,
    *,
    padding: int = 0,
    causal_width: int | None = None,
    shared_chunk: int | None = None,
    index_dtype: torch.dtype | None = None,
    lists_queries: bool = True,
) -> UnifiedMetadata:
    """The step's metadata, every axis padded by ``padding``; index_dtype None: as it is built."""
    plan = plan_of(scene)
    step = plan.fill({axis: n + padding for axis, n in plan.need.items()} if padding else None)
    metadata = step.metadata(scene.shape.block_size, causal_width, shared_chunk)
    ints = {
        field.name: tensor.to(index_dtype or tensor.dtype)
        for field in dataclasses.fields(metadata)
        if isinstance(tensor := getattr(metadata, field.name), Tensor)
        and not tensor.is_floating_point()
    }
    if not lists_queries:
        ints["unique_queries"] = None
    return dataclasses.replace(metadata, **ints)


def attention_of(scene: Scene, metadata: UnifiedMetadata, **options) -> StepResult:
    """The scene's step under this metadata; options: those of `unified_attention`."""
    query, key, value = scene.flat(len(metadata.slot_mapping))
    arguments = {"query": query, "key": key, "value": value, "scale": query.shape[-1] ** -0.5}
    arguments |= {"metadata": metadata, **scene.caches, **options}
    out, lse = unified_attention(**arguments, return_lse=True)
    real = sum(len(request.tokens) for request in scene.requests)
    return StepResult(out[:real], lse[:real], out[real:], lse[real:])


def run(scene: Scene, **options) -> StepResult:
    """`metadata_of`, then `attention_of`, with the options of both."""
    ours = ("padding", "causal_width", "shared_chunk", "index_dtype", "lists_queries")
    of_metadata = {name: options.pop(name) for name in ours if name in options}
    return attention_of(scene, metadata_of(scene, **of_metadata), **options)


def assert_exact(scene: Scene, **options) -> None:
    """A step equals dense attention; its padding is zero and sees nothing."""
    names = ("sliding_window", "softcap", "alibi_slopes", "sinks", "value_projection")
    features = {name: options[name] for name in names if options.get(name) is not None}
    expected, expected_lse = scene.expected(**features)
    result = run(scene, **options)
    atol = TOLERANCE[scene.shape.dtype]
    torch.testing.assert_close(result.out.double(), expected, atol=atol, rtol=atol)
    # The log-sum-exp is handed out in float32.
    torch.testing.assert_close(result.lse.double(), expected_lse, atol=2e-5, rtol=2e-5)
    assert not result.padded_out.any()
    if "sinks" not in features:
        assert result.padded_lse.eq(-math.inf).all()


def step_of(scene: Scene, first: int, last: int) -> Scene:
    """The scene of one request when its tokens ``first .. last - 1`` are new: same cache."""
    (request,) = scene.requests
    step = copy.copy(scene)
    step.requests = [Request(request.tokens[first:last], first, request.block_table)]
    step.keys = [scene.keys[0][:last]]
    step.values = [None if scene.values[0] is None else scene.values[0][:last]]
    step.queries = [scene.queries[0][first:last]]
    return step


def in_chunks(scene: Scene, boundaries: list[int], **options) -> Tensor:
    """The output of a scene of one prompt that is computed in chunks that end there."""
    ends = [0, *boundaries, len(scene.queries[0])]
    steps = [
        run(step_of(scene, first, last), **options).out for first, last in itertools.pairwise(ends)
    ]
    return torch.cat(steps)


def bits(tensor: Tensor | None) -> Tensor | None:
    """A copy of a tensor's bytes: NaN equals NaN."""
    return None if tensor is None else tensor.contiguous().view(torch.uint8).clone()


def random_qkv(tokens, keys, heads=4, kv_heads=2, dim=8, value_dim=None) -> list[Tensor]:
    shapes = ((tokens, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, value_dim or dim))
    return [torch.randn(*shape) for shape in shapes]
