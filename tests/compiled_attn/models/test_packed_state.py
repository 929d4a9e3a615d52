"""The state dict of packed layers is that of plain ones; packing can be undone, and models cast."""

from __future__ import annotations

import contextlib

import pytest
import torch

from compiled_attn.models.packed import (
    PackedLinear,
    pack_linears,
)
from compiled_attn.ops import packed_linear
from tests.compiled_attn.models.packing import (
    IDS,
    KINDS,
    Kind,
    as_bf16_widen,
    assert_state,
    of_any_kind,
    state_of,
)


def with_shared(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state with the weights that two layers share."""
    shared = {"head.weight": "embedding.weight", "of_scaled.weight": "scaled.weight"}
    return {name: state[shared.get(name, name)] for name in state}


def of_packed(kind: Kind, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state as a packed model returns it."""
    packed = "head.weight", "embedding.weight", "inner.a.weight", "inner.b.weight"
    return {name: kind.rounded(w) if name in packed else w for name, w in state.items()}


@of_any_kind
def test_undoing_restores_layers_and_weights(kind):
    model = kind.model()
    modules, parameters, state = dict(model.named_modules()), [*model.parameters()], state_of(model)
    addresses = [parameter.data_ptr() for parameter in parameters]
    with contextlib.ExitStack() as undo:
        pack_linears(model, undo, kind.packing)
    assert all(module is modules[name] for name, module in model.named_modules())
    assert [*map(id, parameters)] == [*map(id, model.parameters())]
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert_state(model, state)
    if kind.bits:  # not converted back
        assert [parameter.data_ptr() for parameter in parameters] == addresses


@of_any_kind
def test_the_state_that_goes_in_and_out_is_that_of_plain_weights(kind):
    model = kind.model()
    plain = state_of(model)
    pack_linears(model, contextlib.ExitStack(), kind.packing)
    assert_state(model, of_packed(kind, plain))
    other = {name: torch.randn_like(w).bfloat16().to(w.dtype) for name, w in plain.items()}
    other = with_shared(other)
    model.load_state_dict(other)
    assert_state(model, of_packed(kind, other))
    with pytest.raises(RuntimeError, match=r"size mismatch for inner\.a\.weight"):
        model.load_state_dict({**other, "inner.a.weight": torch.zeros(32, 32)})


def test_halves_refuse_a_state_that_they_cannot_hold():
    model = KINDS["bf16-widen"].model()
    pack_linears(model, contextlib.ExitStack(), as_bf16_widen)
    state = state_of(model)
    wrong = {**state, "inner.a.weight": state["inner.a.weight"] + 1 / 3}
    with pytest.raises(RuntimeError, match=r"for inner\.a\.weight weights that bfloat16 holds"):
        model.load_state_dict(wrong)
    assert_state(model, state)


@pytest.mark.parametrize("kind", ["packed", "float32", "bf16-widen"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_packed_model_that_is_cast_computes_and_loads_like_a_plain_one(kind, dtype):
    model, plain = KINDS[kind].model(), KINDS[kind].model()
    pack_linears(model, contextlib.ExitStack(), KINDS[kind].packing)
    model.to(dtype), plain.to(dtype)
    if dtype is not KINDS[kind].dtype:  # else by the op
        with torch.no_grad():
            for one, other in zip(model(IDS), plain(IDS), strict=True):
                assert one.dtype is dtype
                torch.testing.assert_close(one, other)
    state = state_of(model)
    assert all(value.dtype is dtype for value in state.values())
    model.load_state_dict(state)
    assert_state(model, state)


def test_an_exception_while_packing_leaves_the_model_unchanged(monkeypatch):
    model = KINDS["packed"].model()
    state, pack, calls = state_of(model), packed_linear.pack, []

    def interrupted(weight):
        calls.append(weight)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return pack(weight)

    monkeypatch.setattr(packed_linear, "pack", interrupted)
    with pytest.raises(KeyboardInterrupt), contextlib.ExitStack() as undo:
        pack_linears(model, undo)
    assert_state(model, state)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
