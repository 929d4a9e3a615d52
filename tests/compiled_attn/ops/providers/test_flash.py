"""Kernels of the FlashAttention family: results, and why they are not taken."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compiled_attn.ops import reference
from compiled_attn.ops.providers import PROVIDERS, library
from tests.compiled_attn.ops.kernels import interpreted
from tests.compiled_attn.ops.native_cases import MIXED
from tests.compiled_attn.ops.native_scene import assert_right, scene
from tests.compiled_attn.ops.providers import doubles
from tests.compiled_attn.ops.providers.doubles import BF16, LACKS, cases, no_paged, written

ROOT = Path(__file__).parents[4]
CAPABILITIES = {"varlen": (9, 0), "dense+paged": (8, 0), "fa3": (9, 0), "flashinfer": (10, 0)}
SOFTCAP = {"softcap": ({"softcap": 2.0}, "has no softcap")}
OWN_LACKS = {
    "varlen": SOFTCAP,
    "dense+paged": {**SOFTCAP, "window": ({"window": 4}, "has no window")},
    "fa3": {},
    "flashinfer": SOFTCAP,
}


@pytest.fixture
def has(monkeypatch):
    """As if on a device of a capability, with libraries that have functions."""

    def install(capability, varlen=None, active="FA3", **functions) -> None:
        doubles.as_if_cuda(monkeypatch, capability)
        doubles.install_varlen(monkeypatch, varlen, active)
        doubles.install_libraries(monkeypatch, **functions)

    yield install
    library._load.cache_clear()


def by_reference(call):
    """Attention over pages without Triton, whose interpreter takes half a second a step."""
    return reference.paged_attention(*call[:6], call.scoring.scale, causal=call.causal)


def paged(call):
    """Triton's kernel, interpreted."""
    interpreted()
    from compiled_attn.ops.triton.launch import attend
    from compiled_attn.ops.triton.tiles import Plan, Tile

    return attend(call, Plan(Tile(16, 16, 4, 1), 2))


def why_not(name, size=4, **options):
    return PROVIDERS[name].why_not(
        written(scene([(2, 5)], size=size, **{"dtype": BF16, **options}))
    )


def call_of(step):
    """The call of a step, with its new tokens if each request has as many keys."""
    lengths = zip(step.query_start_loc.diff().tolist(), step.seq_lens.tolist(), strict=True)
    is_whole = all(new <= keys for new, keys in lengths)
    return written(step) if is_whole and "key_scale" not in step.options else step.call


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("name", CAPABILITIES)
def test_a_step_is_that_of_dense_attention(name, case, has):
    has(CAPABILITIES[name])
    step = scene(**cases()[case])
    call, provider = call_of(step), PROVIDERS[name]
    if lacks := provider.why_not(call):
        pytest.skip(f"{name} {lacks}")
    context = by_reference if name == "dense+paged" else no_paged  # Triton's is below
    assert_right(provider.attend(call, context), step)


@pytest.mark.parametrize("name", CAPABILITIES)
def test_most_cases_of_plain_attention_are_supported(name, has):
    has(CAPABILITIES[name])
    plain = ["mixed", "prompt", "padding", "HND", "block 7", "float16", "padding alone"]
    plain += [] if name == "dense+paged" else ["window 4", "no keys", "not causal"]
    plain += ["softcap"] if name == "fa3" else []
    for case in plain:
        assert PROVIDERS[name].why_not(call_of(scene(**cases()[case]))) is None, case


@pytest.mark.parametrize(
    ("name", "lacks"), [(name, each) for name in OWN_LACKS for each in (*LACKS, *OWN_LACKS[name])]
)
def test_what_a_kernel_does_not_support_has_a_reason(name, lacks, has):
    has(CAPABILITIES[name])
    changes, reason = (LACKS | OWN_LACKS[name])[lacks]
    step = scene([(2, 5)], **{"dtype": BF16, **changes})
    new = written(scene([(2, 5)], dtype=BF16)).new
    assert reason in PROVIDERS[name].why_not(step.call._replace(new=new))


@pytest.mark.parametrize("name", CAPABILITIES)
def test_a_cpu_has_a_reason(name):
    assert why_not(name) == "runs on NVIDIA's devices, not on cpu"


def test_each_has_a_compute_capability_that_it_needs(has):
    has((8, 6))
    assert why_not("varlen") == "has pages with FA3 on sm_90, not on sm_86"
    assert why_not("fa3") == "needs sm_90, not sm_86"
    assert why_not("dense+paged") is None
    has((7, 5))
    assert why_not("dense+paged") == "needs sm_80, not sm_75"
    assert why_not("flashinfer").endswith("for sm_100, not on sm_75")
    has((10, 0))
    assert why_not("varlen") == "has pages with FA3 on sm_90, not on sm_100"
    assert why_not("fa3") == "needs sm_90, not sm_100"
    assert why_not("flashinfer") is None


def test_what_torch_lacks_has_a_reason(has):
    has((9, 0), active=None)
    assert "activate_flash_attention_impl" in why_not("varlen")
    assert why_not("dense+paged") is None
    has((10, 0), active="FA4")
    assert "pages of 128 with FA4, not of 4" in why_not("varlen")
    assert why_not("varlen", size=128) is None
    has((9, 0), active="FA4")
    assert why_not("varlen") == "has pages with FA4 on sm_100, not on sm_90"
    has((9, 0), varlen=lambda query, key, value, return_aux, scale: query)
    for name in ("varlen", "dense+paged"):
        assert why_not(name).startswith("needs torch 2.12: the one of ")
        assert "takes no window_size, enable_gqa" in why_not(name)


def test_a_library_that_is_missing_broken_or_another_has_a_reason(has, monkeypatch):
    has((9, 0), kvcache=lambda q, k_cache, v_cache, causal, **rest: q)
    assert "takes no page_table, cache_seqlens, cu_seqlens_q" in why_not("fa3")
    has((10, 0), context=lambda query, kv_cache: query)
    assert "takes no workspace_buffer, block_tables" in why_not("flashinfer")
    has((9, 0))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    assert why_not("fa3") == "is not installed: flash_attn_3" == PROVIDERS["fa3"].version()
    library._load.cache_clear()
    monkeypatch.setattr(library, "import_module", lambda name: 1 / 0)
    assert why_not("fa3") == "cannot be imported: division by zero"


@pytest.mark.parametrize(
    ("capability", "names"),
    [
        ((9, 0), ["varlen", "dense+paged", "fa3", "descriptors"]),
        ((10, 0), ["dense+paged", "flashinfer", "descriptors"]),
    ],
)
@pytest.mark.parametrize("tokens", [3, 50])
def test_a_warmup_finds_their_results_equal_to_tritons(has, capability, names, tokens, monkeypatch):
    has(capability)
    interpreted()
    monkeypatch.setattr("triton.__version__", "3.9.0")  # older ones lack `specialized`
    from compiled_attn.ops.triton.autotune import tune
    from compiled_attn.ops.triton.plans import REFUSED
    from compiled_attn.ops.triton.tiles import Problem

    problem, device = Problem(tokens, 3, 2, 2, 16, 16, 32, 8, "bfloat16", "none"), "cpu"
    tune(problem, torch.device(device), lambda run: 1.0 + (run.args[1].kernel != "triton"))
    found = {name: each for (_, own, name), each in REFUSED.items() if own == problem}
    REFUSED.clear()
    unproven = "was not run on a device yet", None
    assert found.pop("specialized", None) == (unproven if capability == (9, 0) else None)
    assert found == dict.fromkeys(names, ("was slower than triton", 0.5))


def test_new_tokens_alone_are_not_enough_for_dense_attention(has):
    has((9, 0))
    call = scene(MIXED, dtype=BF16).call
    assert PROVIDERS["dense+paged"].why_not(call).startswith("needs the step's new keys")


def test_new_tokens_are_read_dense_and_the_context_alone_from_pages(has):
    has((9, 0))
    calls = []
    step = scene(MIXED, dtype=BF16, padding=2, padded_requests=1)
    result = PROVIDERS["dense+paged"].attend(
        written(step), lambda call: calls.append(call) or paged(call)
    )
    assert_right(result, step)
    (context,) = calls
    assert context.seq_lens.tolist() == [8, 0, 0, 8, 6, 0]
    assert not context.causal and context.new is None


def test_a_nan_of_a_new_token_or_of_the_context_reaches_the_rows_that_see_it(has):
    has((9, 0))
    step = scene([(3, 3), (2, 7), (2, 2)], dtype=BF16)
    call = written(step)
    call.new.value[0] = torch.nan  # the first token of the first request
    step.value_cache[step.block_table[1, 0], 1] = torch.nan  # of the context of the second
    out, _ = PROVIDERS["dense+paged"].attend(call, paged)
    assert out.isnan().flatten(1).any(1).tolist() == [True] * 5 + [False] * 2


@pytest.mark.parametrize("lse", [torch.inf, -torch.inf, torch.nan])
def test_an_infinite_lse_of_a_new_token_is_nan(lse):
    """FlashAttention 2 has +inf for a row with a NaN score, FlashAttention 3 -inf."""
    interpreted()
    from compiled_attn.ops.triton.combine import combine

    out = torch.ones(2, 1, 16)
    new_lse, starts = torch.tensor([[0.0, lse]]), torch.tensor([0, 2]).int()
    merged, merged_lse = combine((out, new_lse), (out * 3, torch.zeros(2, 1)), starts)
    assert merged[0].eq(2).all() and merged[1].isnan().all() and merged_lse[1].isnan()
    torch.testing.assert_close(merged_lse[0, 0], torch.tensor(2.0).log())


COMPILE = """
import torch
from benchmarks.accelerator.resources import resources
from compiled_attn.ops.triton.combine import combine_kernel, combine_launch

def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")

for dim in (64, 128, 256):
    out = empty(4096, 32, dim, dtype=torch.bfloat16)
    context, starts = (out, empty(4096, 32)), empty(3, dtype=torch.int32)
    launch = combine_launch((out, empty(32, 4096)), context, starts, context)
    for target in ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120"):
        found = resources(combine_kernel, launch, target)
        assert found.spilled == 0 and found.fused_powers == 0, (dim, target, found)
"""


@pytest.mark.slow
def test_the_merge_compiles_for_every_device_without_spills():
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    made = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr


def test_the_double_has_the_signature_of_torchs():
    from torch.nn.attention.varlen import varlen_attn

    own, torchs = (inspect.signature(f).parameters for f in (doubles.varlen_attn, varlen_attn))
    if "block_table" not in torchs:
        pytest.skip("this torch has no pages")
    assert [(p.name, p.kind, p.default) for p in own.values()] == [
        (p.name, p.kind, p.default) for p in torchs.values()
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("name", CAPABILITIES)
def test_on_a_device_a_step_is_that_of_dense_attention(name, case):
    from compiled_attn.ops.triton.arguments import problem_of
    from compiled_attn.ops.triton.launch import attend
    from compiled_attn.ops.triton.plans import Plans

    step = scene(**{"poison": 0.5, **cases()[case]})
    call = doubles.on_device(call_of(step))
    if lacks := PROVIDERS[name].why_not(call):
        pytest.skip(f"{name} {lacks}")
    usual = Plans().of(problem_of(call), call.query.device)
    out, lse = attend(call, usual._replace(kernel=name))
    assert_right((out.cpu(), lse.cpu()), step)
