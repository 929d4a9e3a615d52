"""Every attention module on every backend that runs here: it returns and writes what eager does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compiled_attn import BatchBuilder, PagedKVCache, StepBatch, UnifiedAttention
from compiled_attn.compat.flash import FlashInputs, FlashKVCacheAttention
from compiled_attn.compat.paged import PagedAttention
from graphs import CaptureError, available_backends, capture
from graphs.backends.cudagraph import CudaGraphBackend
from tests.compiled_attn.compat.paged.scene import caches
from tests.graphs.backends.replay_double import ReplayDouble
from tests.oracle import Scene, Shape

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_gradients")

BUCKET = {"tokens": 24, "shared": 8, "unique": 16, "logits": 8}
PAGES, PAGE, KV_HEADS, HEADS, DIM = 40, 4, 2, 4, 16

Inputs = tuple[Tensor | None, ...]


class UnifiedStep(nn.Module):
    """Tensors in, as an engine would capture it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        sizes = (1, PAGES, PAGE, KV_HEADS, DIM)
        self.cache = PagedKVCache(*sizes, dtype=dtype)
        self.attention = UnifiedAttention(self.cache, softcap=5.0)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *step: Tensor) -> Tensor:
        return self.attention(query, key, value, StepBatch(*step).metadata(PAGE))


def _unified(dtype: torch.dtype, seed: int) -> tuple[nn.Module, Inputs]:
    scene = Scene(seed, Shape(PAGE, KV_HEADS, HEADS // KV_HEADS, DIM, PAGES, dtype))
    scene.share_prefix(2).add(5, 1, shared=True).add(0, 7, shared=True).add(9, 1).add(3, 4)
    module = UnifiedStep(dtype)
    module.cache.key(0).copy_(scene.caches["key_cache"])
    module.cache.value(0).copy_(scene.caches["value_cache"])
    step = BatchBuilder(PAGES, PAGE).build(scene.requests, BUCKET)
    return module, (*scene.flat(BUCKET["tokens"]), *step)


def _flash(dtype: torch.dtype, seed: int) -> tuple[nn.Module, Inputs]:
    gen = torch.Generator().manual_seed(seed)
    k_cache, v_cache = (
        torch.randn(PAGES, PAGE, KV_HEADS, DIM, generator=gen).to(dtype) for _ in range(2)
    )
    angles = torch.rand(64, DIM // 2, generator=gen)
    rotary = {"rotary_cos": torch.cos(angles).to(dtype), "rotary_sin": torch.sin(angles).to(dtype)}
    module = FlashKVCacheAttention(k_cache, v_cache, **rotary, return_softmax_lse=True)
    table = torch.randperm(PAGES - 1, generator=gen)[:15].view(3, 5) + 1
    q, k, v = (
        torch.randn(3, 1, heads, DIM, generator=gen).to(dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    lengths = torch.randint(0, 19, (3,), generator=gen).int()
    return module, FlashInputs(q, k, v, lengths, table.int())[:5]


def _paged(dtype: torch.dtype, seed: int) -> tuple[nn.Module, Inputs]:
    gen = torch.Generator().manual_seed(seed)
    both = caches("NHD", PAGES, PAGE, KV_HEADS, DIM, dtype)
    for cache in both:
        cache.copy_(torch.randn(cache.shape, generator=gen))
    module = PagedAttention(*both, KV_HEADS, PAGE, DIM**-0.5, layout="NHD", partition=8)
    tables = torch.randperm(PAGES, generator=gen)[:15].view(3, 5)
    lengths = torch.randint(1, 20, (3,), generator=gen)
    last = lengths - 1
    slots = tables.gather(1, (last // PAGE).unsqueeze(1)).squeeze(1) * PAGE + last % PAGE
    query = torch.randn(3, HEADS, DIM, generator=gen).to(dtype)
    key, value = torch.randn(2, 3, KV_HEADS, DIM, generator=gen).to(dtype)
    query[-1], tables[-1], lengths[-1], slots[-1] = math.nan, -1, 0, -1
    return module, (query, tables.int(), lengths.int(), key, value, slots)


MODULES = {"unified": _unified, "flash": _flash, "paged": _paged}
SLOW = pytest.mark.slow


def _cases() -> Iterator[Any]:
    quick = {("onnxrt", "unified")}
    for module, backend in product(
        MODULES, ("aot_eager", "cudagraph", "onnxrt", "inductor", "aoti")
    ):
        is_quick = backend in ("aot_eager", "cudagraph") or (backend, module) in quick
        marks = () if is_quick else (SLOW,)
        yield pytest.param(module, backend, marks=marks, id=f"{module}-{backend}")


def _captured(backend: str, module: nn.Module, inputs: Inputs) -> Any:
    if backend == "onnxrt":  # has no ops of others
        module.kernel = "portable"
    """The graph; cudagraph stands on a double that replays eager code, as there is no device."""
    if backend == "cudagraph":
        double = CudaGraphBackend(lambda: ReplayDouble(tuple(module.buffers())))
        return capture(module, inputs, backend=double, compiler="eager")
    if reason := available_backends()[backend]:
        pytest.skip(reason)
    return capture(module, inputs, backend=backend)


def _results(module: nn.Module, run: Any, inputs: Inputs) -> list[Tensor]:
    """What a step returns, and what it leaves in the caches."""
    returned = run(*inputs)
    returned = returned if isinstance(returned, tuple) else (returned,)
    return [tensor.clone() for tensor in (*returned, *module.buffers())]


def _load(module: nn.Module, other: nn.Module) -> None:
    for own, new in zip(module.buffers(), other.buffers(), strict=True):
        own.copy_(new)


@pytest.mark.parametrize(("module", "backend"), _cases())
def test_in_float32_outputs_and_caches_equal_eager(module: str, backend: str) -> None:
    make = MODULES[module]
    captured, examples = make(torch.float32, 0)
    graph = _captured(backend, captured, examples)
    for seed in (1, 2):
        eager, inputs = make(torch.float32, seed)
        _load(captured, eager)
        before = [buffer.clone() for buffer in captured.buffers()]
        got, want = _results(captured, graph.run, inputs), _results(eager, eager, inputs)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5, equal_nan=True)
        after = [*captured.buffers()]
        assert any(not _same_bits(a, b) for a, b in zip(before, after, strict=True))


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(*(tensor.contiguous().view(torch.uint8) for tensor in (one, other)))


@pytest.mark.parametrize(
    ("module", "backend"),
    [
        pytest.param("unified", "aot_eager", marks=SLOW),  # 3 s, and in float32 it is quick
        ("flash", "aot_eager"),
        ("paged", "aot_eager"),
        ("unified", "cudagraph"),
        ("flash", "cudagraph"),
        ("paged", "cudagraph"),
        *(pytest.param(m, b, marks=SLOW) for m in MODULES for b in ("inductor", "aoti")),
    ],
)
def test_in_bfloat16_a_backend_is_as_near_to_float32_as_eager(module: str, backend: str) -> None:
    make = MODULES[module]
    captured, examples = make(torch.bfloat16, 0)
    graph = _captured(backend, captured, examples)
    eager, inputs = make(torch.bfloat16, 1)
    _load(captured, eager)
    exact = _in_float32(make, eager)
    wide = tuple(
        each.float() if each is not None and each.dtype == torch.bfloat16 else each
        for each in inputs
    )
    got = _results(captured, graph.run, inputs)
    want = _results(eager, eager, inputs)
    truth = _results(exact, exact, wide)
    for mine, theirs, right in zip(got, want, truth, strict=True):
        assert mine.dtype == theirs.dtype
        finite = right.isfinite()
        assert torch.equal(mine.isfinite(), theirs.isfinite())
        mine, theirs, right = (each[finite].float() for each in (mine, theirs, right))
        unit = torch.finfo(torch.bfloat16).eps * right.abs().max()
        assert (mine - right).abs().max() <= 2 * (theirs - right).abs().max() + unit


def _in_float32(make: Any, module: nn.Module) -> nn.Module:
    wide, _ = make(torch.float32, 0)
    _load(wide, module)
    return wide


@pytest.mark.slow
def test_onnxrt_refuses_bfloat16_with_its_reason() -> None:
    if reason := available_backends()["onnxrt"]:
        pytest.skip(reason)
    with pytest.raises(CaptureError, match=r"ONNX Runtime refuses it: .*NOT_IMPLEMENTED"):
        _captured("onnxrt", *_flash(torch.bfloat16, 0))
