"""Weights that an engine packs as integers: a write to the user's parameter is never lost."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch
from torch import nn

from compiled_attn.engine import Engine, EngineConfig, SamplingParams, local
from compiled_attn.errors import ModelChanged
from compiled_attn.models.hf import PagedCausalLM, cache_for
from compiled_attn.models.hf.snapshot import Snapshot
from compiled_attn.models.packed import PackedLinear, pack_linears, widened_weights
from compiled_attn.ops import load
from tests.compiled_attn.models.packing import KINDS, as_bf16_widen
from tests.compiled_attn.tiny import tiny_model
from tests.slow import slow_but


@pytest.fixture(params=["bf16-widen", "int8", "int4"])
def model(request) -> nn.Sequential:
    """Two layers whose parameters the user has held since before they were packed."""
    load()
    kind = KINDS[request.param]
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 48, bias=False))
    model.bfloat16().to(kind.dtype).eval()
    held = [each.weight for each in model]
    pack_linears(model, contextlib.ExitStack(), kind.packing)
    assert all(isinstance(each, PackedLinear) for each in model)
    assert all(each.weight is weight for each, weight in zip(model, held, strict=True))
    return model


def new(p: nn.Parameter) -> torch.Tensor:
    return torch.randn(p.shape).to(p.dtype)


def step_of(kind, p: nn.Parameter) -> None:
    p.grad = new(p)
    kind([p], lr=0.1).step()


WRITES = {
    "copy_": lambda p: p.copy_(new(p)),
    "data.copy_": lambda p: p.data.copy_(new(p)),
    "detach().copy_": lambda p: p.detach().copy_(new(p)),
    "mul_": lambda p: p.mul_(2),
    "add_": lambda p: p.data.add_(1),
    "neg_": lambda p: p.neg_(),
    "mul_ by one": lambda p: p.mul_(1),
    "data = new": lambda p: setattr(p, "data", new(p)),
    "set_": lambda p: p.set_(new(p)),
    "resize_": lambda p: p.resize_(2, 2),
    "fill_": lambda p: p.fill_(0.5),
    "zero_": lambda p: p.data.zero_(),
    "normal_": lambda p: p.normal_(),
    "init": lambda p: nn.init.xavier_uniform_(p),
    "a row": lambda p: p.__setitem__(3, 0.0),
    "an element": lambda p: p.data.__setitem__((3, 4), 0.0),
    "an element of a view": lambda p: p.view(-1)[5].mul_(2),
    "transposed": lambda p: p.t().mul_(2),
    "out=": lambda p: torch.add(new(p), new(p), out=p.data),
    "masked_fill_": lambda p: p.masked_fill_(new(p) > 0, 0.0),
    "foreach": lambda p: torch._foreach_zero_([p]),
    "SGD": lambda p: step_of(torch.optim.SGD, p),
    "AdamW": lambda p: step_of(torch.optim.AdamW, p),
    "storage": lambda p: p.untyped_storage().fill_(0),
    "data = new in another dtype": lambda p: setattr(p, "data", new(p).double()),
    "share_memory_": lambda p: p.share_memory_(),
    "vector_to_parameters": lambda p: nn.utils.vector_to_parameters(new(p).flatten(), [p]),
}


@pytest.mark.filterwarnings("ignore:Use of masked_fill_ on expanded")
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_to_a_packed_weight_is_refused_or_seen_at_the_next_step(model, write):
    snapshot = Snapshot(model, [*model])
    assert snapshot.difference() is None
    try:
        with torch.no_grad():
            write(model[0].weight)
    except RuntimeError:
        assert snapshot.difference() is None  # nothing was written
    else:
        assert "a packed weight was written to" in snapshot.difference()


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("change", ["assign", "multiply", "add", "multiply by one", "nan"])
def test_a_write_through_a_view_of_numpy_is_seen(change):
    load()
    model = nn.Sequential(nn.Linear(64, 32)).bfloat16().float().eval()
    pack_linears(model, contextlib.ExitStack(), as_bf16_widen)
    snapshot = Snapshot(model, [*model])
    view = model[0].weight.detach().numpy()
    if change in ("assign", "nan"):
        view[2, 3] = 1.5 if change == "assign" else float("nan")
    elif change == "add":
        view += 0.25
    else:
        view *= 2 if change == "multiply" else 1
    assert "a packed weight was written to" in snapshot.difference()


def test_reading_a_packed_weight_gives_its_shape_its_dtype_and_nan(model):
    weight = model[0].weight
    assert weight.shape == (32, 64) and weight.dtype in (torch.float32, torch.bfloat16)
    assert weight.isnan().all() and weight.untyped_storage().nbytes() == weight.itemsize
    snapshot = Snapshot(model, [*model])
    assert (weight.float() @ torch.ones(64)).isnan().all() and weight.sum().isnan()
    assert snapshot.difference() is None


def test_load_state_dict_writes_new_values(model):
    snapshot, x = Snapshot(model, [*model]), torch.randn(3, 64).to(model[0].weight.dtype)
    with torch.no_grad():
        before = model(x)
        state = {name: value * 2 for name, value in model.state_dict().items()}
        for assign in (False, True):
            model.load_state_dict(state, assign=assign)
            torch.testing.assert_close(model(x), before * 4, rtol=1e-2, atol=1e-2)
    state.pop("0.weight")
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.weight"):
        model.load_state_dict(state)
    assert "cast or moved" not in str(snapshot.difference())


def test_packed_weights_have_no_gradients(model):
    model[0].weight.requires_grad_(True)
    with pytest.raises(ModelChanged, match="got requires_grad"):
        model(torch.randn(3, 64).to(model[0].weight.dtype))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_packed_model_is_watched_apart_from_it(model, copied):
    other, x = copied(model), torch.randn(3, 64).to(model[0].weight.dtype)
    with torch.no_grad():
        assert torch.equal(other(x), model(x))
    assert other[0].weight.data_ptr() == other[1].weight.data_ptr()
    mine, own = (Snapshot(each, [*each]) for each in (model, other))
    other[0].weight.data.zero_()
    assert mine.difference() is None
    assert "a packed weight was written to" in own.difference()


def test_a_cast_of_a_packed_model_is_seen(model):
    snapshot = Snapshot(model, [*model])
    model.to(torch.float64)
    assert model[0].weight.dtype is torch.float64
    assert model[0].weight.untyped_storage().nbytes() == 8
    assert "cast or moved" in snapshot.difference()


def test_what_changes_nothing_is_no_write(model):
    snapshot, weight = Snapshot(model, [*model]), model[0].weight
    weight.data = weight.data
    weight.data = weight
    model.to(weight.dtype)
    assert snapshot.difference() is None


class ReadsItsWeight(nn.Module):
    """Computes in the dtype of its weight, as layers of some families do."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x.to(self.up.weight.dtype)) * self.up.weight.shape[0]


def test_a_compiled_layer_may_read_the_dtype_of_a_packed_weight(fresh_compiler):
    load()
    model = ReadsItsWeight().bfloat16().float()
    x = torch.randn(3, 64)
    with torch.no_grad():
        before = model(x)
        pack_linears(model, contextlib.ExitStack(), as_bf16_widen)
        assert widened_weights(model) == 1
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), before)


@pytest.mark.parametrize("backend", slow_but(("eager",), ("eager", "inductor")))
def test_an_engine_refuses_to_serve_after_a_write_that_would_be_lost(
    backend, fresh_compiler, monkeypatch
):
    monkeypatch.setattr(local, "packs", lambda *_: as_bf16_widen)  # whether or not it pays here
    model = tiny_model(num_hidden_layers=1).bfloat16().float()
    held = model.model.layers[0].mlp.up_proj.weight
    config = EngineConfig(backend=backend, context=32, block_size=4, max_seqs=2, max_graphs=2)
    engine = Engine(model, config)
    assert engine.executor.module.widened
    engine.warmup()
    sampling = SamplingParams(max_new_tokens=4)
    tokens = [each.tokens for each in engine.generate([[1, 2, 3]], sampling)]
    with pytest.raises(RuntimeError):
        held.mul_(2)
    assert [each.tokens for each in engine.generate([[1, 2, 3]], sampling)] == tokens
    held.data.zero_()
    with pytest.raises(ModelChanged, match="a packed weight was written to"):
        list(engine.generate([[1, 2, 3]], sampling))


def test_parameters_may_be_written_again_after_packing_was_undone():
    model = tiny_model().bfloat16().float()
    with contextlib.ExitStack() as undo:
        pack_linears(model, undo, as_bf16_widen)
        assert widened_weights(model)
    paged = PagedCausalLM(model, cache_for(model, 8, 4))
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    paged.check_unchanged()
