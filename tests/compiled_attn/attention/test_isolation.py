"""Whatever a request holds, bits of rows that do not see it stay; rows that see a NaN show it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_attn import unified_attention
from compiled_attn.attention.dense import attend
from compiled_attn.attention.sdpa import SdpaKernel
from tests.compiled_attn.poison import arguments_of, both_metadata, elements, hurt_rows
from tests.oracle import Scene, Shape

SLOW = pytest.mark.slow
STEPS: dict[str, Callable[[Scene], Scene]] = {
    "decodes": lambda s: s.add(9, 1).add(6, 1).add(13, 1).add(3, 1),
    "prompts": lambda s: s.add(0, 7).add(5, 4).add(0, 3),
    "shared": lambda s: s.share_prefix(2).add(1, 1, shared=True).add(3, 1, shared=True).add(6, 1),
    "mixed": lambda s: (
        s.share_prefix(2)
        .add(1, 1, shared=True)
        .add(0, 4, shared=True)
        .add(9, 1)
        .add(5, 3)
        .add(4, 1)
    ),
}
SHAPES = {
    "float32": Shape(),
    "float64": Shape(dtype=torch.float64),
    "bfloat16": Shape(dtype=torch.bfloat16),
    "float16 of 80": Shape(dtype=torch.float16, head_dim=80, value_dim=48),
    "int8": Shape(cache_dtype=torch.int8),
    "int8 of bfloat16": Shape(dtype=torch.bfloat16, cache_dtype=torch.int8),
    "e4m3": Shape(cache_dtype=torch.float8_e4m3fn),
    "e5m2 of bfloat16": Shape(dtype=torch.bfloat16, cache_dtype=torch.float8_e5m2),
    "latents": Shape(kv_heads=1, group=4, head_dim=24, latent=True),
    "int8 latents": Shape(kv_heads=1, group=4, head_dim=24, latent=True, cache_dtype=torch.int8),
}
SLOPES, SINKS = torch.tensor([0.5, 0.25, 0.1, 0.05]), torch.tensor([0.5, -1.0, 2.0, 0.0])
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 5},
    "softcap": {"softcap": 0.7},
    "ALiBi": {"alibi_slopes": SLOPES},
    "sinks": {"sinks": SINKS},
    "all": {"sliding_window": 5, "softcap": 0.7, "alibi_slopes": SLOPES, "sinks": SINKS},
}
KERNELS: dict[str, dict[str, Any]] = {
    "reference": {"kernel": "portable", "attend": attend},
    "sdpa": {"kernel": "portable", "attend": SdpaKernel.attend},
    "native": {"kernel": "native"},
}
OF_METADATA = {"in chunks": {"shared_chunk": 1}, "sliced": {"causal_width": 3}, "whole": {}}


def _fits(kernel: str, features: str, shape: str) -> bool:
    if kernel == "sdpa":
        return "softcap" not in FEATURES[features]
    return kernel != "native" or SHAPES[shape].dtype != torch.float64


def _cases() -> Iterator[Any]:
    quick = {
        *product(STEPS, KERNELS, ["plain"], ["float32"], ["whole"]),
        *product(["mixed"], KERNELS, ["all", "ALiBi"], ["float32"], ["in chunks"]),
        *product(["mixed"], KERNELS, ["plain"], ["int8"], ["sliced"]),
    }
    grid = [
        *product(STEPS, KERNELS, FEATURES, ["float32"], OF_METADATA),
        *product(["mixed"], KERNELS, ["plain", "window", "all"], SHAPES, ["whole"]),
        *product(["mixed"], KERNELS, ["plain"], ["int8"], ["sliced"]),
    ]
    for case in dict.fromkeys(grid):
        _, kernel, features, shape, _ = case
        if _fits(kernel, features, shape):
            marks = () if case in quick else (SLOW,)
            yield pytest.param(*case, marks=marks, id="-".join(case))


def _assert_isolated(
    scene: Scene, run: Callable[..., tuple[Tensor, Tensor]], metadata: Any, window: int | None
) -> None:
    """Poisons every element with NaN and with an infinity, against a run without poison."""
    arguments = arguments_of(scene, metadata)
    copies = {k: v.clone() if isinstance(v, Tensor) else v for k, v in arguments.items()}
    clean_out, clean_lse = (result.clone() for result in run(**copies))
    real = sum(len(request.tokens) for request in scene.requests)
    assert clean_out.isfinite().all() and clean_lse[:real].isfinite().all()
    for number, (element, is_nan) in enumerate(product(elements(scene), (True, False))):
        poison = math.nan if is_nan else (math.inf, -math.inf)[number // 2 % 2]
        if math.isinf(poison) and arguments[element.argument].dtype == torch.float8_e4m3fn:
            continue  # has no inf
        out, lse = run(**element.poisoned(arguments, poison))
        hurt = torch.zeros(len(out), dtype=torch.bool)
        hurt[:real] = hurt_rows(scene, element, window)
        assert torch.equal(out[~hurt], clean_out[~hurt]), (element, poison)
        assert torch.equal(lse[~hurt], clean_lse[~hurt]), (element, poison)
        if math.isnan(poison):
            assert out[hurt].isnan().flatten(1).any(1).all(), (element, poison)


def _runner(shape: Shape, metadata: Any, **options: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    if shape.latent:
        gen = torch.Generator().manual_seed(0)
        options["value_projection"] = torch.randn(4, 16, 5, generator=gen)
    scale = shape.head_dim**-0.5

    def run(**tensors: Any) -> tuple[Tensor, Tensor]:
        result = unified_attention(
            **tensors, scale=scale, metadata=metadata, return_lse=True, **options
        )
        assert isinstance(result, tuple)
        return result

    return run


@pytest.mark.parametrize(("step", "kernel", "features", "shape", "pieces"), [*_cases()])
def test_bits_of_rows_that_do_not_see_it_stay(request, step, kernel, features, shape, pieces):
    if kernel == "native":
        request.getfixturevalue("compiler")
    scene = STEPS[step](Scene(3, SHAPES[shape]))
    metadata = both_metadata(scene, **OF_METADATA[pieces])
    options = FEATURES[features] | KERNELS[kernel]
    run = _runner(SHAPES[shape], metadata, **options)
    with torch.no_grad():
        _assert_isolated(scene, run, metadata, options.get("sliding_window"))


@pytest.mark.slow  # 10 s each; the same rows are isolated as eager, and paged ones by inductor
@pytest.mark.parametrize(
    ("step", "kernel", "features", "shape", "pieces"),
    [
        ("shared", "reference", "plain", "float32", "whole"),
        ("mixed", "reference", "plain", "float32", "whole"),
        ("decodes", "reference", "plain", "bfloat16", "whole"),
        ("mixed", "sdpa", "window", "float32", "sliced"),
        ("mixed", "sdpa", "sinks", "bfloat16", "in chunks"),
        ("mixed", "reference", "all", "int8", "in chunks"),
        ("mixed", "reference", "plain", "int8 latents", "whole"),
        ("mixed", "native", "window", "float32", "whole"),
    ],
)
def test_in_a_graph_of_inductor_too(request, step, kernel, features, shape, pieces):
    if kernel == "native":
        request.getfixturevalue("compiler")
    scene = STEPS[step](Scene(3, SHAPES[shape]))
    metadata = both_metadata(scene, **OF_METADATA[pieces])
    options = FEATURES[features] | KERNELS[kernel]
    torch._dynamo.reset()
    run = torch.compile(_runner(SHAPES[shape], metadata, **options), fullgraph=True, dynamic=False)
    with torch.no_grad():
        _assert_isolated(scene, run, metadata, options.get("sliding_window"))
    torch._dynamo.reset()
