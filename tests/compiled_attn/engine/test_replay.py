"""Replayed steps of an engine: the tokens of `generate`, and steps that go wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from compiled_attn.engine import Engine
from graphs import explicit
from tests.compiled_attn.engine.small import greedy, plain, prompts_of, small_engine
from tests.compiled_attn.tiny import tiny_model
from tests.slow import slow_but

NEW = 8

PROMPTS = prompts_of(6, seed=5, longest=40, vocab=120)

pytestmark = pytest.mark.usefixtures("compiler")


def _model(family: str, layers: int = 1) -> PreTrainedModel:
    return tiny_model(family, num_hidden_layers=layers)


def _engine(family: str | PreTrainedModel, **changes) -> Engine:
    model = _model(family) if isinstance(family, str) else family
    settings = {"num_blocks": 128, "backend": "inductor", "weights": "packed", **changes}
    return small_engine(model, **settings)


def _texts(engine: Engine) -> list[list[int]]:
    return greedy(engine, PROMPTS, NEW)


# Windows and two layers; other families differ in what test_recorder has.
@pytest.fixture(scope="module", params=slow_but(("mistral",), ("llama", "mistral", "qwen3")))
def served(request, compiler):
    """A family, its engine, and the tokens that it wrote."""
    engine = _engine(_model(request.param, layers=2))
    return request.param, engine, _texts(engine)


def test_every_step_is_replayed_and_every_token_that_of_generate(served):
    family, engine, texts = served
    report = engine.report()
    assert report.kernel_notes["replay"] == f"{report.graphs} graphs run without Python"
    assert report.replays == report.steps > 10
    assert (report.compiles_after_warmup, report.graph_breaks, report.fallbacks) == (0, 0, 0)
    assert report.compiled_graphs == 1
    assert {row["graph"] for row in report.buckets} == {"step[tokens requests]"}
    assert texts == plain(_model(family, layers=2), PROMPTS, NEW)


def test_tokens_are_the_same_where_graphs_run_as_inductor_wrote_them(served, monkeypatch):
    _, engine, texts = served
    before = engine.report().replays
    monkeypatch.setattr(engine.executor._replays, "enabled", False)
    assert _texts(engine) == texts
    assert engine.report().replays == before


def test_caches_of_8_bits_are_replayed_too():
    engine = _engine("mistral", kv_dtype="int8")
    eager = _engine("mistral", kv_dtype="int8", backend="eager")
    assert _texts(engine) == _texts(eager)
    report = engine.report()
    assert report.replays == report.steps
    assert (report.compiles_after_warmup, report.graph_breaks, report.fallbacks) == (0, 0, 0)


@pytest.mark.slow  # test_aten_matmul replays such layers by themselves
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_layers_that_are_left_to_a_library_are_replayed_too(family):
    engine = _engine(family, weights="plain")
    report = engine.report()
    assert report.kernel_notes["replay"] == f"{report.graphs} graphs run without Python"
    assert _texts(engine) == plain(_model(family), PROMPTS, NEW)
    assert engine.report().replays == engine.report().steps


class Largest(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.topk(1).values


def test_what_cannot_be_replayed_is_named_in_the_report():
    model = _model("llama")
    model.model.layers[0].mlp.act_fn = Largest()
    engine = _engine(model, buckets=explicit(("tokens", "requests"), [(24, 4)]))
    notes = engine.report().kernel_notes["replay"]
    assert notes.startswith("0 graphs run without Python; ") and "not: it calls aten.topk" in notes
    _texts(engine)
    assert engine.report().replays == 0
