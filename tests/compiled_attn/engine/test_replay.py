"""Replayed steps of an engine: the tokens of `generate`, and steps that go wrong."""

from __future__ import annotations

import numpy as np
import pytest

from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from tests.compiled_attn.tiny import plain_generate, tiny_model

NEW = 8

pytestmark = pytest.mark.usefixtures("compiler")


def _engine(family: str, **changes) -> Engine:
    settings = {
        "max_tokens_per_step": 24,
        "max_seqs": 4,
        "block_size": 4,
        "num_blocks": 256,
        "backend": "inductor",
        "max_graphs": 4,
        "weights": "packed",
        **changes,
    }
    engine = Engine(tiny_model(family), EngineConfig(**settings))
    engine.warmup()
    return engine


def _prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    prefix = rng.integers(1, 120, 16).tolist()
    return [
        (prefix if index % 2 else []) + rng.integers(1, 120, int(rng.integers(1, 40))).tolist()
        for index in range(6)
    ]


def _texts(engine: Engine) -> list[list[int]]:
    sampling = SamplingParams(max_new_tokens=NEW)
    return [each.tokens for each in engine.generate(_prompts(), sampling, in_order=True)]


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
    plain = tiny_model(family)
    assert texts == [plain_generate(plain, prompt, NEW) for prompt in _prompts()]


def test_tokens_are_the_same_where_graphs_run_as_inductor_wrote_them(served, monkeypatch):
    _, engine, texts = served
    before = engine.report().replays
    monkeypatch.setattr(engine.executor._replays, "enabled", False)
    assert _texts(engine) == texts
    assert engine.report().replays == before


def test_caches_of_8_bits_are_replayed_too():
    engine = _engine("llama", kv_dtype="int8")
    plain = _engine("llama", kv_dtype="int8", backend="eager")
    assert _texts(engine) == _texts(plain)
    assert engine.report().replays == engine.report().steps


def test_layers_that_are_left_to_a_library_are_replayed_too(served):
    family, _, texts = served
    engine = _engine(family, weights="plain")
    report = engine.report()
    assert report.kernel_notes["replay"] == f"{report.graphs} graphs run without Python"
    assert _texts(engine) == texts
    assert engine.report().replays == engine.report().steps


def test_what_cannot_be_replayed_is_named_in_the_report():
    engine = _engine("gpt_oss")
    notes = engine.report().kernel_notes["replay"]
    assert notes.startswith("0 graphs run without Python; ") and "not: it calls aten.topk" in notes
    _texts(engine)
    assert engine.report().replays == 0
