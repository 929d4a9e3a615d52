from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel

from compiled_attn import LLM
from compiled_attn.engine import SamplingParams
from compiled_attn.errors import ConfigError
from compiled_attn.text import Answer, AnswerPieces
from compiled_attn.text.answer import end_of
from tests.compiled_attn.text.models import save_chat_model
from tests.compiled_attn.tiny import plain_generate

PROMPTS = ["the", "Hello, 你好 🎉", "a", "one two three four five six", "x" * 40]
SHORT = SamplingParams(max_new_tokens=24)


ROUNDING = 1e-4  # of these logits in float32, ten times what is measured against float64


@pytest.fixture(scope="module")
def answers(llm: LLM) -> list[Answer]:
    return llm.generate(PROMPTS, SHORT)


@pytest.fixture(scope="module")
def texts(answers: list[Answer]) -> list[str]:
    return [answer.text for answer in answers]


def settled(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> int:
    """How many greedy tokens no rounding can change: up to the first that is nearly a tie."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    best, second = logits.topk(2).values.unbind(1)
    near = (best - second < 2 * ROUNDING).nonzero()
    return int(near[0]) if len(near) else len(tokens)


def test_answers_are_those_of_plain_generate_in_the_order_of_the_prompts(llm, model_dir, answers):
    plain = AutoModelForCausalLM.from_pretrained(model_dir)
    exact = AutoModelForCausalLM.from_pretrained(model_dir).double()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens, own = llm.tokenizer.encode(prompt), answer.result.tokens
        assert len(own) == 24 and answer.text == llm.tokenizer.decode(own)
        expected = plain_generate(plain, tokens, 24)
        count = settled(exact, tokens, expected)
        assert own[:count] == expected[:count] and count > 0


def test_a_stream_has_the_same_text_in_pieces(llm, texts):
    for prompt, text in zip(PROMPTS, texts, strict=True):
        pieces = [*llm.stream(prompt, SHORT)]
        assert "".join(pieces) == text and all(pieces)


def test_a_stop_string_ends_the_request_in_the_engine_and_is_cut_off(llm, texts):
    text = max(texts, key=len)
    stop = text[6:10]  # over several tokens, as most of them are bytes
    prompt, sampling = PROMPTS[texts.index(text)], SamplingParams(max_new_tokens=24, stop=stop)
    before = llm.engine.report().generated_tokens
    (answer,) = llm.generate([prompt], sampling)
    assert answer.text == text[: text.index(stop)]
    assert answer.result.finish_reason == "stop"
    tokens = answer.result.tokens
    assert llm.engine.report().generated_tokens - before == len(tokens) < 24
    assert stop in llm.tokenizer.decode(tokens) and stop not in llm.tokenizer.decode(tokens[:-1])
    assert "".join(llm.stream(prompt, sampling)) == answer.text


def test_a_chat_is_answered_by_the_template_alone_or_with_others(llm):
    chats = [[{"role": "user", "content": text}] for text in ("Hello", "the 🎉")]
    rendered = [f"<user>{text}<end><model>" for text in ("Hello", "the 🎉")]
    expected = [answer.text for answer in llm.generate(rendered, SHORT)]
    assert [answer.text for answer in llm.chat(chats, SHORT)] == expected
    assert [answer.text for answer in llm.chat(chats[0], SHORT)] == expected[:1]
    assert "".join(llm.stream(chats[1], SHORT)) == expected[1]


def test_closing_a_stream_frees_its_blocks(llm):
    pieces = llm.stream("one two three", SamplingParams(max_new_tokens=200))
    next(pieces)
    assert llm.engine.pool.stats().used > 0 and llm.engine.open_requests
    pieces.close()
    assert llm.engine.pool.stats().used == 0 and not llm.engine.open_requests
    assert llm.generate(["the"], SHORT)[0].result.finish_reason == "length"


def test_prompts_of_another_salt_share_nothing(llm):
    prompt = "a prompt that fills several blocks of eight tokens each"
    llm.generate([prompt], SHORT, salt="one")
    before = llm.engine.memory.stats().hit_tokens
    llm.generate([prompt], SHORT, salt="another")
    assert llm.engine.memory.stats().hit_tokens == before
    llm.generate([prompt], SHORT, salt="one")
    assert llm.engine.memory.stats().hit_tokens > before


def test_end_tokens_are_no_part_of_the_text(llm):
    (answer,) = llm.generate(["the"], SHORT)
    end = answer.result.tokens[5]
    at = answer.result.tokens.index(end)
    (stopped,) = llm.generate(["the"], SamplingParams(max_new_tokens=24, stop_token_ids=(end,)))
    assert stopped.result.tokens == answer.result.tokens[: at + 1]
    assert stopped.text == llm.tokenizer.decode(answer.result.tokens[:at])
    sampling = stopped.result.sampling
    assert "".join(llm.stream("the", sampling)) == stopped.text
    assert llm.engine.end_tokens(sampling) == {end}


@given(st.data())
def test_the_pieces_of_an_answer_are_its_text(llm, data):
    tokens = data.draw(st.lists(st.integers(0, 264), max_size=16))
    stop = data.draw(st.lists(st.text("ab\n", min_size=1, max_size=3), max_size=2))
    pieces = AnswerPieces(llm.tokenizer, SamplingParams(stop=tuple(stop)), frozenset({7}))
    cut = tokens[: tokens.index(7)] if 7 in tokens else tokens
    text = llm.tokenizer.decode(cut)
    shown = "".join([*map(pieces.put, cut), pieces.put(7), pieces.rest()])
    assert shown == text[: end_of(text, stop)]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("Hello", "expected a list of prompts, got 'Hello'"),
        (["Hello", ""], "got an empty one"),
        (["x" * 300], r"prompt \+ max_new_tokens <= context 256, got 300 \+ 24: shorten"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_is(llm, prompts, message):
    before = llm.engine.report().steps
    with pytest.raises(ConfigError, match=message):
        llm.generate(prompts, SHORT)
    with pytest.raises(ConfigError):
        llm.stream(prompts[-1] if prompts != "Hello" else "", SHORT)
    assert llm.engine.report().steps == before


def test_continuations_of_a_prompt_stand_together_and_are_no_stream(llm):
    several = SamplingParams(max_new_tokens=9, temperature=1.0, seed=3, n=2)
    answers = llm.generate(["the", "a"], several)
    named = [(answer.result.index, answer.result.choice) for answer in answers]
    assert named == [(0, 0), (0, 1), (1, 0), (1, 1)]
    alone = SamplingParams(max_new_tokens=9, temperature=1.0, seed=4)
    assert answers[1].text == llm.generate(["the"], alone)[0].text
    with pytest.raises(ConfigError, match="expected n = 1 for a stream of text, got 2"):
        llm.stream("the", several)


def test_a_request_that_fails_ends_its_stream_with_its_error(tmp_path, config):
    llm = LLM(save_chat_model(tmp_path), config)
    with torch.no_grad():
        next(iter(llm.engine.executor.module.model.lm_head.parameters())).fill_(float("nan"))
    with pytest.raises(RuntimeError, match="expected finite logits"):
        list(llm.stream("the", SHORT))
    (answer,) = llm.generate(["the"], SHORT)
    assert (answer.text, answer.result.finish_reason) == ("", "error")
