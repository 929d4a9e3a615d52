from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra hf")

from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from compiled_attn.models.hf.proof import Difference, check

EOS = 5
VOCAB = 97


@dataclass(frozen=True)
class Result:
    index: int
    prompt: list[int]
    tokens: list[int]


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "initializer_range": 0.2,
        "eos_token_id": EOS,
    }
    return LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval()


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding without a cache, ``generate`` or end-of-sequence token."""
    text = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture
def results(model: LlamaForCausalLM) -> list[Result]:
    prompts = [[(7 * i + j) % VOCAB for j in range(6 + i)] for i in range(5)]
    return [Result(i, prompt, greedy(model, prompt, 12)) for i, prompt in enumerate(prompts)]


def next_logits(model: Any, result: Result, position: int) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([result.prompt + result.tokens[:position]])).logits
    assert isinstance(logits, torch.Tensor)
    return logits[0, -1]


def test_right_results_have_no_mismatch(model, results):
    report = check(model, results, 5)
    assert (report.checked_requests, report.checked_tokens) == (5, 60)
    assert (report.mismatched_tokens, report.mismatches, report.ties) == (0, [], [])


def test_a_wrong_token_is_counted_with_both_logits(model, results):
    right = results[2].tokens[11]
    wrong = (right + 1) % VOCAB
    results[2] = replace(results[2], tokens=[*results[2].tokens[:11], wrong])
    report = check(model, results, 5)
    logits = next_logits(model, results[2], 11)
    assert report.mismatched_tokens == 1
    (difference,) = report.mismatches
    assert (difference.request, difference.position) == (2, 11)
    assert (difference.engine_token, difference.plain_token) == (wrong, right)
    assert difference.engine_logit == pytest.approx(logits[wrong].item(), abs=1e-5)
    assert difference.plain_logit == pytest.approx(logits[right].item(), abs=1e-5)


def test_tokens_after_a_mismatch_count_if_they_differ(model, results):
    right = results[0].tokens
    results[0] = replace(results[0], tokens=[*right[:4], *((t + 1) % VOCAB for t in right[4:])])
    assert check(model, results, 5).mismatched_tokens == 8


def test_a_tie_is_reported_and_the_comparison_goes_on(results):
    model = tiny_llama(tie_word_embeddings=False)
    twin, original = 50, results[1].tokens[3]
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[original] * (1 - 1e-7)
    prompt = results[1].prompt
    tokens = greedy(model, prompt, 3)
    assert greedy(model, prompt, 4)[3] in (twin, original)
    other = twin if greedy(model, prompt, 4)[3] == original else original
    tokens = [*tokens, other]
    tokens += greedy(model, prompt + tokens, 6)
    report = check(model, [Result(1, prompt, tokens)], 1)
    assert (report.mismatched_tokens, report.checked_tokens) == (0, 10)
    (tie,) = report.ties
    assert (tie.position, tie.engine_token) == (3, other)
    assert tie.engine_logit == pytest.approx(tie.plain_logit, rel=1e-5)

    wrong = [*tokens[:9], (tokens[9] + 1) % VOCAB]
    report = check(model, [Result(1, prompt, wrong)], 1)
    assert (len(report.ties), report.mismatched_tokens) == (1, 1)


def test_without_any_rounding_a_bfloat16_model_is_right_and_some_tokens_are_ties():
    model = tiny_llama(vocab_size=1024, num_hidden_layers=6).to(torch.bfloat16)
    exact = copy.deepcopy(model).float()
    prompts = [[(31 * i + 7 * j) % 1024 for j in range(9)] for i in range(12)]
    results = [Result(i, prompt, greedy(exact, prompt, 24)) for i, prompt in enumerate(prompts)]
    report = check(model, results, len(results))
    assert report.mismatches == [] and len(report.ties) >= 3
    assert all(0 < tie.distance <= tie.tie_bound for tie in report.ties)
    roundoff = [2**-8 * (abs(tie.engine_logit) + abs(tie.plain_logit)) for tie in report.ties]
    assert any(tie.distance > own for tie, own in zip(report.ties, roundoff, strict=True))


def test_no_token_of_the_next_best_is_a_tie_where_rounding_does_not_reach():
    """Four tokens are within 4e-2 of the largest logit, but farther apart than bfloat16 rounds."""
    model = tiny_llama(tie_word_embeddings=False).to(torch.bfloat16)
    prompt = [3, 14, 15, 92, 65, 35]
    with torch.no_grad():
        hidden = model.model(torch.tensor([prompt])).last_hidden_state[0, -1].float()
        for token, logit in zip((10, 20, 30, 40), (8.0, 7.9, 7.8, 7.7), strict=True):
            model.lm_head.weight[token] = hidden * (logit / hidden.square().sum())
    best, *others = next_logits(model, Result(0, prompt, []), 0).topk(4).indices.tolist()
    assert (best, sorted(others)) == (10, [20, 30, 40])
    for other in others:
        report = check(model, [Result(0, prompt, [other])], 1)
        (difference,) = report.mismatches
        assert report.mismatched_tokens == 1 and report.ties == []
        assert difference.tie_bound < difference.distance < 4e-2 * 8
        assert f"{difference.distance:.3g} apart, rounding explains" in str(difference)
    assert check(model, [Result(0, prompt, [best])], 1).mismatched_tokens == 0


def test_generation_settings_of_the_model_do_not_change_the_comparison(model, results):
    model.generation_config.eos_token_id = results[0].tokens[2]
    model.generation_config.do_sample = True
    model.generation_config.temperature = 9.0
    model.generation_config.repetition_penalty = 5.0
    report = check(model, results, 5)
    assert (report.checked_tokens, report.mismatched_tokens) == (60, 0)


def test_attention_and_generation_settings_are_restored_even_after_an_error(model, results):
    model.set_attn_implementation("eager")
    generation = model.generation_config

    def stop(done: int, total: int) -> None:
        assert model.config._attn_implementation == "sdpa"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check(model, results, 2, on_checked=stop)
    assert model.config._attn_implementation == "eager"
    assert model.generation_config is generation


def test_requests_are_spread_over_the_demand_and_empty_ones_left_out(model, results):
    wrong = {i: replace(r, tokens=[(r.tokens[0] + 1) % VOCAB]) for i, r in enumerate(results)}
    wrong[0] = replace(results[0], tokens=[])
    report = check(model, [wrong[i] for i in (3, 1, 4, 0, 2)], 2)
    assert [m.request for m in report.mismatches] == [1, 3]
    assert check(model, list(wrong.values()), 99).checked_requests == 4
    assert check(model, results, 0).checked_requests == 0


def test_progress_is_reported_after_each_request(model, results):
    calls: list[tuple[int, int]] = []
    check(model, results, 3, on_checked=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 3), (2, 3), (3, 3)]


def tiny_gemma2(softcap: float | None) -> Gemma2ForCausalLM:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.5,
        tie_word_embeddings=False,
        attn_logit_softcapping=softcap,
        attn_implementation="eager",
    )
    return Gemma2ForCausalLM(config).eval()


def test_a_capped_model_is_checked_with_attention_that_caps():
    model, prompt = tiny_gemma2(softcap=0.05), list(range(20, 40))
    tokens = greedy(model, prompt, 12)
    assert tokens != greedy(tiny_gemma2(softcap=None), prompt, 12)
    model.set_attn_implementation("flex_attention")
    assert check(model, [Result(0, prompt, tokens)], 1).mismatched_tokens == 0
    assert model.config._attn_implementation == "flex_attention"


def test_a_negative_count_is_refused(model):
    with pytest.raises(ValueError, match="expected count >= 0, got -1"):
        check(model, [], -1)


def test_a_difference_reads_as_one_line():
    text = str(Difference(3, 7, 11, 12, 0.5, 0.25))
    assert text == "request 3, generated token 7: engine 11 (logit 0.5), generate 12 (logit 0.25)"
