"""Torch's flash attention over pages as a kernel of the op: results, and why it is not taken."""

from __future__ import annotations

import inspect

import pytest

from compiled_attn.ops.providers.varlen import VarlenKernel
from tests.compiled_attn.ops.native_scene import assert_right, scene
from tests.compiled_attn.ops.providers import varlen_double
from tests.compiled_attn.ops.providers.doubles import (
    BF16,
    LACKS,
    as_if_cuda,
    cases,
    no_paged,
    on_device,
)


@pytest.fixture(autouse=True)
def torch_has(monkeypatch):
    """Lets torch have a function, and an implementation of flash attention, on a device."""

    def has(function=varlen_double.varlen_attn, active="FA3", capability=(9, 0)) -> None:
        as_if_cuda(monkeypatch, capability)
        varlen_double.install(monkeypatch, function, active)

    has()
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


@pytest.mark.parametrize("name", cases())
def test_a_step_is_that_of_dense_attention(name):
    step = scene(**cases()[name])
    if lacks := VarlenKernel().why_not(step.call):
        pytest.skip(f"varlen {lacks}")
    assert_right(VarlenKernel().attend(step.call, no_paged), step)


def test_most_cases_of_plain_attention_are_supported():
    supported = {n for n, c in cases().items() if not VarlenKernel().why_not(scene(**c).call)}
    assert {"mixed", "window 4", "not causal", "padding", "no keys", "HND", "block 7"} < supported


@pytest.mark.parametrize("name", LACKS)
def test_what_it_does_not_support_has_a_reason(name):
    changes, reason = LACKS[name]
    assert reason in VarlenKernel().why_not(scene([(1, 5)], **{"dtype": BF16, **changes}).call)


def test_what_torch_lacks_here_has_a_reason(torch_has):
    def why_not(size=4):
        return VarlenKernel().why_not(scene([(1, 5)], dtype=BF16, size=size).call)

    assert why_not() is None
    torch_has(active=None)
    assert "activate_flash_attention_impl" in why_not()
    torch_has(active="FA4", capability=(10, 0))
    assert "pages of 128 with FA4, not of 4" in why_not()
    assert why_not(128) is None
    torch_has(active="FA4")
    assert why_not() == "has pages with FA4 on sm_100, not on sm_90"
    torch_has(capability=(8, 6))
    assert why_not() == "has pages with FA3 on sm_90, not on sm_86"
    torch_has(lambda query, key, value: query)
    assert "needs torch 2.12" in why_not()


@pytest.mark.gpu
@pytest.mark.parametrize("name", cases())
def test_on_a_device_a_step_is_that_of_dense_attention(name, monkeypatch):
    monkeypatch.undo()
    step = scene(**{"poison": 0.5, **cases()[name]})
    call = on_device(step.call)
    if lacks := VarlenKernel().why_not(call):
        pytest.skip(f"varlen {lacks}")
    out, lse = VarlenKernel().attend(call, no_paged)
    assert_right((out.cpu(), lse.cpu()), step)
