"""Torch's flash attention over pages as a kernel of the op: results, and why it is not taken."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from compiled_attn.ops import AttentionTraits, KernelArgumentError, choose, varlen
from compiled_attn.ops.varlen import VarlenKernel, attend, traits_of
from tests.compiled_attn.ops import varlen_double
from tests.compiled_attn.ops.kernels import interpreted
from tests.compiled_attn.ops.native_cases import CASES, MIXED
from tests.compiled_attn.ops.native_scene import assert_right, scene

BF16 = torch.bfloat16
PLAIN = AttentionTraits("cuda", BF16, (BF16, BF16), 64, page=16)

LACKS = {
    "a CPU": ({"device": "cpu"}, "runs on cuda, not on cpu"),
    "gradients": ({"gradients": True}, "no gradients"),
    "softcap": ({"softcap": True}, "no softcap"),
    "sinks": ({"sinks": True}, "no sinks"),
    "ALiBi and softcap": ({"alibi": 1, "softcap": True}, "no softcap and no ALiBi"),
    "float32": ({"dtype": torch.float32}, "not in torch.float32"),
    "codes": ({"cache_dtypes": (torch.int8, torch.int8)}, "no cache of torch.int8"),
    "a large head": ({"head_dim": 576}, "up to 256, not 576"),
    "an odd head": ({"head_dim": 84}, "that 8 divides, up to 256, not 84"),
    "smaller values": ({"value_dim": 32}, "head size of keys, 64, not 32"),
}


def supported() -> dict[str, dict]:
    """The cases of the op that it supports, in a dtype that it has."""
    cases = {}
    for name, case in CASES.items():
        dtype = case.get("dtype", torch.float32)
        case = case | {"dtype": BF16 if dtype == torch.float32 else dtype}
        traits = replace(traits_of(scene(**case).call), device="cuda")
        if VarlenKernel().supports(traits) is None:
            cases[name] = case
    return cases


SUPPORTED = supported()


@pytest.fixture
def torch_has(monkeypatch):
    """Lets torch have a function, and an implementation of flash attention."""

    def has(function=varlen_double.varlen_attn, active="FA3") -> None:
        module = SimpleNamespace(varlen_attn=function, current_flash_attention_impl=lambda: active)
        module.AuxRequest = lambda lse: SimpleNamespace(lse=lse)
        monkeypatch.setattr(varlen, "import_module", lambda name: module)

    return has


def test_the_double_has_the_signature_of_torchs():
    from torch.nn.attention.varlen import varlen_attn

    own, torchs = (
        inspect.signature(f).parameters for f in (varlen_double.varlen_attn, varlen_attn)
    )
    if "block_table" not in torchs:
        pytest.skip("this torch has no pages")
    assert [(p.name, p.kind, p.default) for p in own.values()] == [
        (p.name, p.kind, p.default) for p in torchs.values()
    ]


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_step_is_that_of_dense_attention(name, torch_has):
    torch_has()
    step = scene(**SUPPORTED[name])
    assert_right(attend(step.call), step)


def test_most_cases_of_plain_attention_are_supported():
    assert {"mixed", "window 4", "not causal", "padding", "no keys", "HND", "block 7"} < {
        *SUPPORTED
    }


@pytest.mark.parametrize("name", LACKS)
def test_what_it_does_not_support_has_a_reason(name):
    changes, reason = LACKS[name]
    with pytest.raises(KernelArgumentError, match=f"varlen .*{reason}"):
        choose(replace(PLAIN, **changes), [VarlenKernel()])


def test_what_torch_lacks_here_has_a_reason(torch_has):
    torch_has()
    assert VarlenKernel().supports(PLAIN) is None and VarlenKernel().unavailable(PLAIN) is None
    torch_has(active=None)
    assert "activate_flash_attention_impl" in VarlenKernel().unavailable(PLAIN)
    torch_has(active="FA4")
    assert "pages of 128 with FA4, not of 16" in VarlenKernel().unavailable(PLAIN)
    assert VarlenKernel().unavailable(replace(PLAIN, page=128)) is None
    torch_has(lambda query, key, value: query)
    assert "needs torch 2.12" in VarlenKernel().unavailable(PLAIN)


@pytest.fixture
def on_cpu(torch_has, monkeypatch):
    """As if the tensors of the tests were on a device."""
    interpreted()
    torch_has()
    monkeypatch.setattr(VarlenKernel, "supports", _on_cuda(VarlenKernel.supports))


def _on_cuda(supports):
    return lambda self, traits: supports(self, replace(traits, device="cuda"))


def test_the_faster_one_is_found_in_the_warmup(on_cpu):
    from compiled_attn.ops.triton.autotune import tune
    from compiled_attn.ops.triton.tiles import Problem

    problem = Problem(4, 4, 2, 2, 16, 16, 128, 8, "bfloat16", "none")
    device = torch.device("cpu")
    for fast in (True, False):
        assert tune(problem, device, lambda run, f=fast: run.args[1].varlen != f).varlen == fast

    def refuses(run):
        if run.args[1].varlen:
            raise RuntimeError("FA3 forward unsupported: pages")
        return 1.0

    assert not tune(problem, device, refuses).varlen
    assert not tune(problem._replace(dtype="float32"), device, lambda run: 1.0).varlen


def test_a_plan_that_takes_it_does_so_where_it_serves_the_call(on_cpu, monkeypatch):
    from compiled_attn.ops.triton.launch import attend as attend_by_plan
    from compiled_attn.ops.triton.tiles import Plan, Tile

    asked = []
    monkeypatch.setattr(varlen, "attend", lambda call: asked.append(call) or attend(call))
    chosen = Plan(Tile(16, 16, 4, 1), 1, varlen=True)
    for options, count in (({}, 1), ({"softcap": 2.0}, 1), ({"window": 3}, 2)):
        step = scene(MIXED, dtype=BF16, **options)
        assert_right(attend_by_plan(step.call, chosen), step)
        assert len(asked) == count


@pytest.fixture
def warmup(on_cpu, monkeypatch):
    """Attends calls in a warmup that measures by a clock, and returns its note for the report."""
    from compiled_attn.ops.triton import autotune, launch, plan_file
    from compiled_attn.ops.triton.plans import Plans

    refused, tune = {}, autotune.tune
    for module in (autotune, launch):
        monkeypatch.setattr(module, "REFUSED", refused)

    def run(clock, *options):
        plans = Plans()
        monkeypatch.setattr(autotune, "tune", partial(tune, clock=clock))
        monkeypatch.setattr(launch, "PLANS", plans)
        with plan_file.saved_plans(None, torch.device("cpu"), plans) as notes:
            for each in options:
                launch.attend(scene(MIXED, dtype=BF16, **each).call)
        launch.attend(scene(MIXED, dtype=BF16).call)  # outside a warmup: not reported
        return notes

    return run


def test_the_report_tells_how_many_calls_it_serves_and_why_not_the_others(warmup):
    def fast(run):
        return not run.args[1].varlen

    def slow(run):
        return run.args[1].varlen

    assert warmup(fast, {}, {}, {"window": 3}) == {"varlen": "serves 1 of 1 kinds of calls"}
    assert warmup(fast, {}, {"softcap": 2.0}) == {
        "varlen": "serves 1 of 2 kinds of calls; 1 not, as it has no softcap"
    }
    assert warmup(slow, {}) == {
        "varlen": "serves 0 of 1 kinds of calls; 1 not, as it was not faster than Triton when it "
        "was measured"
    }
    assert warmup(fast) == {}


def test_the_report_tells_what_it_said_when_it_was_called(warmup):
    def refuses(run):
        if run.args[1].varlen:
            raise RuntimeError("FA3 forward unsupported: pages\nat line 3")
        return 1.0

    note = "serves 0 of 1 kinds of calls; 1 not, as it failed: FA3 forward unsupported: pages"
    assert warmup(refuses, {}) == {"varlen": note}


@pytest.mark.gpu
@pytest.mark.parametrize("name", SUPPORTED)
def test_on_a_device_a_step_is_that_of_dense_attention(name):
    step = (
        scene(**SUPPORTED[name], poison=0.5)
        if "poison" not in SUPPORTED[name]
        else scene(**SUPPORTED[name])
    )
    there = step.call
    tensors = {k: v.cuda() for k, v in there._asdict().items() if isinstance(v, torch.Tensor)}
    call = there._replace(**tensors)
    if lacks := varlen.why_not(call):
        pytest.skip(f"varlen {lacks}")
    out, lse = attend(call)
    assert_right((out.cpu(), lse.cpu()), step)
