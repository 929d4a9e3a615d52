"""Replayed steps of an engine: the tokens of `generate`, and steps that go wrong."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from compiled_attn.engine import Engine
from graphs import explicit
from tests.compiled_attn.engine.small import greedy, plain, prompts_of, small_engine
from tests.compiled_attn.tiny import tiny_model
from tests.slow import slow_but

NEW = 8

PROMPTS = prompts_of(6, seed=5, longest=40, vocab=120)

pytestmark = pytest.mark.usefixtures("compiler")


def _model(family: str) -> PreTrainedModel:
    """Two layers of one family; of the others, whose graphs take as long to compile, one."""
    return tiny_model(family, num_hidden_layers=2 if family == "llama" else 1)


def _engine(family: str, **changes) -> Engine:
    settings = {"num_blocks": 128, "backend": "inductor", "weights": "packed", **changes}
    return small_engine(_model(family), **settings)


def _texts(engine: Engine) -> list[list[int]]:
    return greedy(engine, PROMPTS, NEW)


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen3"])
def served(request, compiler):
    """A family, its engine, and the tokens that it wrote."""
    engine = _engine(request.param)
    return request.param, engine, _texts(engine)


def test_every_step_is_replayed_and_every_token_that_of_generate(served):
    family, engine, texts = served
    report = engine.report()
    assert report.kernel_notes["replay"] == f"{report.graphs} graphs run without Python"
    assert report.replays == report.steps > 10
    assert (report.compiles_after_warmup, report.fallbacks) == (0, 0)
    assert texts == plain(_model(family), PROMPTS, NEW)


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
    assert engine.report().replays == engine.report().steps


# Its replay differs in the products of the layers only, which are those of each family.
@pytest.mark.parametrize("family", slow_but(("qwen3",), ("llama", "mistral", "qwen3")))
def test_layers_that_are_left_to_a_library_are_replayed_too(family):
    engine = _engine(family, weights="plain")
    report = engine.report()
    assert report.kernel_notes["replay"] == f"{report.graphs} graphs run without Python"
    assert _texts(engine) == plain(_model(family), PROMPTS, NEW)
    assert engine.report().replays == engine.report().steps


def test_what_cannot_be_replayed_is_named_in_the_report():
    engine = _engine("gpt_oss", buckets=explicit(("tokens", "requests"), [(24, 4)]))
    notes = engine.report().kernel_notes["replay"]
    assert notes.startswith("0 graphs run without Python; ") and "not: it calls aten.topk" in notes
    _texts(engine)
    assert engine.report().replays == 0
