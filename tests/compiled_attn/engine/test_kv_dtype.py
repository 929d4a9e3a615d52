"""Keys and values in 8 bits: the tokens of a model that is rounded so, in half of the memory."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from compiled_attn.cache.quantisation import quantise
from compiled_attn.engine import ConfigError, Engine, EngineConfig, SamplingParams
from compiled_attn.engine.cache_size import CacheSize
from compiled_attn.models import default_model
from compiled_attn.models.hf.proof import check
from graphs.store.factors import graph_factors
from tests.compiled_attn.engine.rounded import KINDS, rounded_logits
from tests.compiled_attn.engine.small import greedy, prompts_of, small_engine
from tests.compiled_attn.tiny import tiny_model
from tests.slow import slow_but

NEW = 12
SAMPLING = SamplingParams(max_new_tokens=NEW)

_prompts = partial(prompts_of, seed=5, longest=40, vocab=120)

pytestmark = pytest.mark.usefixtures("compiler")


def _engine(model, kv_dtype, **changes) -> Engine:
    return small_engine(model, kv_dtype=kv_dtype, **{"num_blocks": 256, **changes})


def _tokens(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    return greedy(engine, prompts, NEW)


# Both kinds and both kernels; the op's tests have each kernel with each kind.
PAIRS = slow_but((("int8", "native"), ("fp8", "portable")), product(KINDS, ("native", "portable")))


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize(("kind", "kernel"), PAIRS)
def test_every_token_is_the_likeliest_of_a_model_whose_cache_is_rounded_so(kind, kernel, family):
    model, prompts = tiny_model(family), _prompts(6)
    engine = _engine(model, kind, kernel=kernel)
    for prompt, tokens in zip(prompts, _tokens(engine, prompts), strict=True):
        rows = rounded_logits(model, prompt + tokens[:-1], kind)[len(prompt) - 1 :]
        short = rows.amax(-1) - rows[range(NEW), tokens]
        # An element that lies between two codes may become the other one.
        assert (short <= 2e-3 * rows.std(-1)).all()


@pytest.mark.parametrize(("kind", "kernel"), PAIRS)
def test_prefix_cache_preemption_and_defragmentation_change_no_token(kind, kernel):
    model, prompts = tiny_model(), _prompts(7, longest=30)
    plenty = _tokens(_engine(model, kind, kernel=kernel, defrag_waste=1), prompts)
    engine = _engine(model, kind, kernel=kernel, num_blocks=18, defrag_waste=0.0)
    assert _tokens(engine, prompts) == plenty
    report = engine.report()
    assert report.preemptions > 0 and report.memory["defrag_moves"] > 0
    assert report.prefix_hit_ratio > 0


@pytest.mark.parametrize(("kind", "kernel"), PAIRS)
def test_what_is_not_finite_in_a_cache_of_8_bits_hurts_no_other(kind, kernel):
    poison, prompts = 127, _prompts(6)
    model = tiny_model()
    model.get_input_embeddings().weight.data[poison] = math.nan
    model.lm_head.weight.data[poison] = 0.0  # so that nobody generates it
    clean = _tokens(_engine(model, kind, kernel=kernel), prompts)
    engine = _engine(model, kind, kernel=kernel)
    bad = {1: [*prompts[1], poison, *range(1, 30)], 4: [poison]}
    served = [bad.get(index, prompt) for index, prompt in enumerate(prompts)]
    for index, result in enumerate(engine.generate(served, SAMPLING, in_order=True)):
        assert (result.finish_reason == "error") == (index in bad)
        assert index in bad or result.tokens == clean[index]
    # Nothing of it is found by a prompt that begins like it.
    (result,) = engine.generate([[*prompts[1], 5]], SAMPLING)
    assert result.finish_reason == "length"


@pytest.mark.slow  # test_replay looks at the same of int8
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_captured_graphs_serve_8_bits_as_eager_does_and_compile_nothing(kind):
    model, prompts = tiny_model("mistral", num_hidden_layers=1), _prompts(3)
    settings = {"weights": "packed", "num_blocks": 128}
    eager = _tokens(_engine(model, kind, **settings), prompts)
    engine = _engine(model, kind, backend="inductor", **settings)
    assert _tokens(engine, prompts) == eager
    report = engine.report()
    assert (report.compiles_after_warmup, report.graph_breaks, report.fallbacks) == (0, 0, 0)


def test_8_bits_hold_nearly_twice_the_tokens_of_16():
    model = default_model(dtype=torch.bfloat16)
    config = {"kv_memory": "16MiB", "context": 64}
    sizes = {
        kind: CacheSize.of(model, EngineConfig(**config, kv_dtype=kind), 64)
        for kind in ("auto", *KINDS)
    }
    assert sizes["auto"].dtype == "bfloat16" and sizes["fp8"].dtype == "float8_e4m3fn"
    for kind in KINDS:  # 64 elements in 64 bytes and 4 of a scale
        assert sizes[kind].tokens / sizes["auto"].tokens == pytest.approx(128 / 68, rel=0.01)
        assert sizes[kind].bytes <= 16 * 2**20


@pytest.mark.parametrize("kernel", ["native", "portable"])
def test_a_model_in_float64_or_bfloat16_takes_a_cache_of_8_bits(kernel):
    for dtype in (torch.bfloat16, torch.float64):
        auto = kernel if dtype == torch.bfloat16 else "auto"
        engine = _engine(tiny_model().to(dtype), "int8", kernel=auto)
        assert all(len(tokens) == NEW for tokens in _tokens(engine, _prompts(2)))
        assert engine.report().kv_cache["dtype"] == "int8"


def test_a_graph_in_the_store_is_of_one_element_type():
    states = set()
    for kind in ("auto", *KINDS):
        module = _engine(tiny_model(), kind).executor.module
        factors = graph_factors(module, [], backend="eager", options={})
        states.add(factors["state"])
    assert len(states) == 3


@pytest.mark.parametrize("kind", ["int4", "fp8_e5m2", "float8_e4m3fn", "", None])
def test_other_element_types_are_refused(kind):
    with pytest.raises(
        ConfigError, match=r"expected a kv_dtype of \('auto', 'int8', 'fp8'\), got .*: choose one"
    ):
        EngineConfig(kv_dtype=kind)


def test_a_backend_that_cannot_capture_8_bits_is_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"backend onnxrt, got 'int8', .*another backend"):
        EngineConfig(kv_dtype="int8", backend="onnxrt")


@pytest.mark.parametrize(("kind", "kernel"), PAIRS)
def test_a_check_compares_with_a_model_that_rounds_so(kind, kernel):
    model = tiny_model()
    engine = _engine(model, kind, kernel=kernel)
    results = list(engine.generate(_prompts(20), SAMPLING, in_order=True))
    assert check(model, results, 20, kv_dtype=KINDS[kind]).mismatches == []
    assert check(model, results, 20).mismatches != []
    least = int(rounded_logits(model, results[0].prompt, kind)[-1].argmin())
    wrong = [replace(results[0], tokens=[least, *results[0].tokens[1:]])]
    assert check(model, wrong, 1, kv_dtype=KINDS[kind]).mismatched_tokens >= 1
    assert model.config._attn_implementation == "compiled_attn"
    engine.executor.check_unchanged()


@pytest.mark.parametrize("kind", KINDS)
def test_a_check_finds_scales_that_are_wrong(kind, monkeypatch):
    def wrong(rows, dtype):
        codes, scale = quantise(rows, dtype)
        return codes, scale * 1.3

    model = tiny_model()
    engine = _engine(model, kind, kernel="portable")
    monkeypatch.setattr("compiled_attn.cache.kv_cache.quantise", wrong)
    results = list(engine.generate(_prompts(20), SAMPLING, in_order=True))
    assert check(model, results, 20, kv_dtype=KINDS[kind]).mismatched_tokens > 0
