from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._inductor.utils import run_and_get_code

from compiled_attn.compat.flash import (
    FlashInputs,
    FlashKVCacheAttention,
    flash_attn_with_kvcache,
    flash_attn_with_kvcache_reference,
)
from compiled_attn.ops import KernelChoice
from tests.compiled_attn.compat.flash.cases import Case, assert_close
from tests.graph_breaks.tracing import (
    allocations,
    aot_graph,
    cache_sized,
    calls,
    dynamo_graph,
    op_name,
)
from tests.slow import slow_but

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_gradients")

PAGES, PAGE, KV_HEADS, DIM = 300, 4, 2, 16
CACHE = PAGES * PAGE * KV_HEADS * DIM
STORAGE: dict[str, tuple[tuple[int, ...], Callable[[Tensor], tuple[Tensor, Tensor]]]] = {
    "stacked": ((2, PAGES, PAGE, KV_HEADS, DIM), lambda x: (x[0], x[1])),
    "fused": ((PAGES, PAGE, 2, KV_HEADS, DIM), lambda x: (x[:, :, 0], x[:, :, 1])),
    "transposed": (
        (2, PAGES, KV_HEADS, PAGE, DIM),
        lambda x: (x[0].transpose(1, 2), x[1].transpose(1, 2)),
    ),
}


def inputs(batch: int, columns: int, queries: int = 1, seed: int = 0) -> FlashInputs:
    """Random rows over distinct pages, without page 0."""
    gen = torch.Generator().manual_seed(seed)
    table = torch.randperm(PAGES - 1, generator=gen)[: batch * columns].view(batch, columns) + 1
    room = columns * PAGE - queries + 1
    return FlashInputs(
        torch.randn(batch, queries, 2 * KV_HEADS, DIM, generator=gen),
        torch.randn(batch, queries, KV_HEADS, DIM, generator=gen),
        torch.randn(batch, queries, KV_HEADS, DIM, generator=gen),
        torch.randint(0, room, (batch,), generator=gen).int(),
        table.int(),
    )


def module(
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    kernel: KernelChoice = "portable",
) -> FlashKVCacheAttention:
    gen = torch.Generator().manual_seed(9)
    shape = (PAGES, PAGE, KV_HEADS, DIM)
    k_cache = torch.randn(shape, generator=gen) if k_cache is None else k_cache
    v_cache = torch.randn(shape, generator=gen) if v_cache is None else v_cache
    angles = torch.rand(64, DIM // 2, generator=gen)
    return FlashKVCacheAttention(
        k_cache,
        v_cache,
        rotary_cos=torch.cos(angles),
        rotary_sin=torch.sin(angles),
        return_softmax_lse=True,
        kernel=kernel,
    )


@pytest.mark.parametrize("queries", slow_but((24,), (1, 24)))
def test_two_buckets_are_exactly_two_full_graphs(queries):
    counter = CompileCounter()
    compiled = torch.compile(module(), backend=counter, fullgraph=True, dynamic=False)
    for seed in range(3):
        for batch, columns in ((2, 8), (4, 10)):
            compiled(*inputs(batch, columns, queries, seed))
    assert counter.frame_count == 2


def test_an_int_length_that_grows_does_not_compile_each_step():
    counter = CompileCounter()
    compiled = torch.compile(flash_attn_with_kvcache, backend=counter, fullgraph=True)
    case = Case(new=1, capacity=40, lengths=[0, 0]).make()
    for length in range(2, 20):
        case.run(compiled, cache_seqlens=length)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("backend", slow_but(("aot_eager",), ("eager", "aot_eager")))
@pytest.mark.parametrize("seed", range(6))
def test_compiled_calls_equal_the_reference_and_show_their_writes(backend, seed):
    sizes: dict[str, Any] = [
        {"page_size": 4, "new": 1, "causal": True},
        {"page_size": 3, "new": 2, "queries": 5, "leftpad": True, "batch_idx": True, "splits": 3},
        {"new": 1, "dim": 32, "rotary": 16, "batch_idx": True, "softcap": 3.0},
        {"queries": 40, "capacity": 48, "new": 40, "window": (5, 0), "alibi": "rows"},
        {"queries": 2, "page_size": 7, "storage": "fused", "new": 3, "alibi": "heads"},
        {"page_size": 16, "storage": "transposed", "new": 1, "dtype": torch.bfloat16},
    ][seed]
    compiled = torch.compile(flash_attn_with_kvcache, backend=backend, fullgraph=True)
    case = Case(seed=seed, **sizes).make()
    if case.dtype == torch.bfloat16:  # the native kernel rounds otherwise than the reference
        case.args["kernel"] = "portable"
    assert_equals_reference(case, compiled)


@pytest.mark.parametrize(
    "sizes",
    [
        {"page_size": 4, "new": 1, "causal": True, "dim": 32, "rotary": 16, "leftpad": True},
        pytest.param(
            {"queries": 20, "new": 20, "capacity": 32, "window": (9, 0), "alibi": "rows"}
            | {"splits": 2},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_inductor_equals_the_reference_and_shows_its_writes(sizes):
    compiled = torch.compile(flash_attn_with_kvcache, fullgraph=True)
    assert_equals_reference(Case(seed=3, **sizes).make(), compiled)


def assert_equals_reference(case: Case, compiled: Any) -> None:
    before = case.bits()
    expected, expected_lse = case.run(flash_attn_with_kvcache_reference)
    written = case.bits()
    case.restore(before)
    out, lse = case.run(compiled)
    assert_close(out, expected.double(), expected, 1)
    finite = expected_lse.isfinite()
    assert torch.equal(lse.isfinite(), finite)
    assert torch.allclose(lse[finite], expected_lse[finite], atol=1e-5)
    after, right = (bits.view(case.dtype) for bits in (case.bits(), written))
    assert not torch.equal(written, before)
    assert torch.allclose(after, right, equal_nan=True, atol=1e-6)
    assert torch.equal(after.isfinite(), right.isfinite())


@pytest.mark.parametrize("backend", slow_but(("inductor",), ("aot_eager", "inductor")))
def test_bad_numbers_fail_in_a_compiled_graph_before_anything_is_written(backend):
    attention = module()
    before = attention.k_cache.clone()
    compiled = torch.compile(attention, backend=backend, fullgraph=True, dynamic=False)
    good = inputs(2, 3)
    for lengths in ([12, 0], [3, -1]):
        with pytest.raises(RuntimeError, match=r"cache_seqlens \+ Sn within .* block_table"):
            compiled(*good._replace(cache_seqlens=torch.tensor(lengths, dtype=torch.int32)))
    assert good.block_table is not None
    for page in (-1, PAGES):
        table = good.block_table.clone()
        table[0, 0] = page
        with pytest.raises(RuntimeError, match="used entries of block_table"):
            compiled(*good._replace(block_table=table))
    assert torch.equal(attention.k_cache, before)
    out, lse = compiled(*good)
    eager = module()
    expected, expected_lse = eager(*good)
    assert torch.allclose(out, expected, atol=1e-6) and torch.allclose(lse, expected_lse, atol=1e-6)
    assert torch.allclose(attention.k_cache, eager.k_cache, atol=1e-6)
    assert not torch.equal(attention.k_cache, before)


def test_it_exports_and_keeps_its_assertions():
    attention, given = module(), inputs(2, 3)
    expected = module()(*given)[0]
    exported = torch.export.export(attention, given[:5]).module()
    assert torch.allclose(exported(*given[:5])[0], expected, atol=1e-6)
    with pytest.raises(RuntimeError, match="block_table"):
        exported(*given._replace(cache_seqlens=torch.tensor([12, 0], dtype=torch.int32))[:5])


def test_a_row_that_is_not_there_fails_in_a_compiled_graph():
    case = Case(new=1, batch_idx=True).make()
    before = case.bits()
    compiled = torch.compile(flash_attn_with_kvcache, backend="aot_eager", fullgraph=True)
    for row in (-1, 5):
        with pytest.raises(RuntimeError, match="cache_batch_idx within the rows"):
            case.run(compiled, cache_batch_idx=torch.tensor([0, row], dtype=torch.int32))
    assert torch.equal(case.bits(), before)


def test_without_dynamic_false_two_graphs_serve_every_bucket():
    # The second bucket makes Dynamo's graph of symbolic sizes, and that serves the others.
    counter = CompileCounter()
    compiled = torch.compile(flash_attn_with_kvcache, backend=counter, fullgraph=True)
    cached = module()
    for batch, columns in ((2, 8), (4, 10), (3, 6), (5, 7)):
        q, k, v, lengths, table, *_ = inputs(batch, columns)
        args = q, cached.k_cache, cached.v_cache, k, v, None, None, lengths, None, None, table
        out = compiled(*args, causal=True)
        assert torch.allclose(out, flash_attn_with_kvcache(*args, causal=True), atol=1e-6)
    assert counter.frame_count == 2


def test_interleaved_views_of_open_sizes_equal_the_reference():
    function = flash_attn_with_kvcache
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    assert_equals_reference(Case(seed=1, new=2, storage="interleaved heads").make(), compiled)


def test_a_cache_of_its_own_is_updated_by_index_put_alone():
    # Inductor does this update in place: see the buffers that it allocates, below.
    assert cache_sized(aot_graph(module(), *inputs(2, 3)), CACHE) == ["index_put", "index_put"]


@pytest.mark.parametrize("kind", STORAGE)
@pytest.mark.parametrize("inside", [False, True])
def test_views_are_updated_by_the_op_and_never_scattered_back(kind, inside):
    function, base = over_views(kind, inside)
    ops = cache_sized(aot_graph(function, base, *inputs(2, 3)), CACHE)
    assert ops and set(ops) == {"getitem"}  # what the op gives back


def over_views(kind: str, inside: bool) -> tuple[Callable[..., Any], Any]:
    """The attention over views of one buffer, taken in the graph or before it."""
    shape, views = STORAGE[kind]
    base = torch.randn(shape, generator=torch.Generator().manual_seed(1))

    def call(
        caches: Any, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor, *_: Any
    ) -> Any:
        k_cache, v_cache = views(caches) if inside else caches
        return flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=table, causal=True
        )

    return call, base if inside else views(base)


@pytest.mark.parametrize(
    "kind", slow_but(("of its own", "fused"), ("of its own", "fused", "fused, inside"))
)
def test_inductor_allocates_nothing_of_the_size_of_the_cache(kind):
    given = inputs(2, 3)
    if kind == "of its own":
        attention = module()
        function: Any = lambda caches, *args: attention(*args)  # noqa: E731
        caches: Any = None
    else:
        function, caches = over_views("fused", kind.endswith("inside"))
    out, codes = run_and_get_code(torch.compile(function, fullgraph=True), caches, *given)
    assert out is not None and len(codes) == 1
    assert max(allocations(codes[0])) < CACHE


class Snapshot(expecttest.TestCase):
    """What Dynamo captures, by the names of the operations."""

    maxDiff = None

    def captured(self, function: Any, *args: Any) -> str:
        names = [op_name(node.target) for node in calls(dynamo_graph(function, *args))]
        noise = {"_set_grad_enabled", "getitem", "getattr"}
        return textwrap.fill(" ".join(name for name in names if name not in noise), 90)

    def test_a_native_decode_step_is_captured_as_recorded(self):
        self.assertExpectedInline(
            self.captured(module(kernel="native"), *inputs(2, 3)),
            """\
ge le and_ all _assert_async zeros_like minimum unsqueeze arange mul add gt unsqueeze add
lt and_ lt ge or_ and_ any invert _assert_async long add zeros_like eq all where unsqueeze
arange mul add unsqueeze arange mul add unsqueeze to unsqueeze to to unflatten unbind mul
mul sub mul mul add stack flatten to cat unsqueeze to unsqueeze to to unflatten unbind mul
mul sub mul mul add stack flatten to cat long div gather mul sub setitem setitem ge where
arange mul flatten ge le and_ where int contiguous contiguous paged_attention unflatten
unflatten transpose""",
        )
