"""Completions of several prompts, of token ids, and with the prompt before the answer."""

from __future__ import annotations

import openai
import pytest

from compiled_attn.engine import GenerationResult, SamplingParams, TokenLogprobs
from compiled_attn.serve.token_logprobs import scored_tokens
from compiled_attn.text import LLM
from tests.compiled_attn.serve.conftest import NAME, Running

TEXTS = ["over the sea", "the moon is", "a"]
DRAWN = {"temperature": 1.5, "seed": 5}


def text(server: Running, prompt: object, **more: object):
    settings = {"model": NAME, "prompt": prompt, "max_tokens": 8, **DRAWN, **more}
    return server.client.completions.create(**settings)


def answers(alone: LLM, prompt: str, **more: object) -> list:
    return alone.generate([prompt], SamplingParams(max_new_tokens=8, **DRAWN, **more))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("as_tokens", [False, True])
def test_several_prompts_are_answered_in_their_order(server, alone, as_tokens, n):
    ids = [alone.tokenizer.encode(each) for each in TEXTS]
    want = [each.text for prompt in TEXTS for each in answers(alone, prompt, n=n)]
    given = text(server, ids if as_tokens else TEXTS, n=n)
    assert [(each.index, each.text) for each in given.choices] == [*enumerate(want)]
    prompts, own = sum(map(len, ids)), 8 * n * len(TEXTS)
    assert given.usage.prompt_tokens == prompts and given.usage.completion_tokens == own
    assert given.usage.total_tokens == prompts + own
    texts, usage = [""] * len(want), None
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in text(server, ids if as_tokens else TEXTS, n=n, **options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == want
    assert (usage.prompt_tokens, usage.completion_tokens) == (prompts, own)


def test_one_prompt_of_tokens_may_be_special_ones(server, alone):
    end = min(alone.tokenizer.special)
    assert text(server, [end]).usage.prompt_tokens == 1
    want = answers(alone, TEXTS[0])[0].text
    assert text(server, alone.tokenizer.encode(TEXTS[0])).choices[0].text == want


def test_without_a_limit_each_prompt_has_the_room_that_is_left(server):
    ids = [[5] * 250, [5] * 10]
    given = text(server, ids, max_tokens=openai.NOT_GIVEN)
    assert given.usage.completion_tokens == (256 - 250) + (256 - 10)


@pytest.mark.parametrize("n", [1, 2])
def test_an_echo_begins_with_the_prompt_and_its_log_probabilities(server, alone, n):
    ids = alone.tokenizer.encode(TEXTS[0])
    want = answers(alone, TEXTS[0], n=n, logprobs=2, prompt_logprobs=2)
    for prompt in (TEXTS[0], ids):
        given = text(server, prompt, n=n, echo=True, logprobs=2).choices
        for choice, answer in zip(given, want, strict=True):
            assert choice.text == TEXTS[0] + answer.text
            scores = [*answer.result.prompt_logprobs, *answer.result.logprobs]
            tokens = [*ids, *answer.result.tokens]
            scored = choice.logprobs
            assert scored.tokens == [*map(alone.tokenizer.text_of, tokens)]
            assert scored.token_logprobs[0] is None and scored.top_logprobs[0] is None
            values = [each.logprob for each in scores[1:]]
            assert scored.token_logprobs[1:] == pytest.approx(values, abs=1e-4)
            for token, at in zip(scored.tokens[: len(ids)], scored.text_offset, strict=False):
                assert choice.text.startswith(token, at)
            assert scored.text_offset[len(ids)] == len(TEXTS[0])
    assert text(server, TEXTS[0], echo=True).choices[0].text == TEXTS[0] + want[0].text
    assert text(server, TEXTS[0], echo=True).choices[0].logprobs is None
    with pytest.raises(openai.BadRequestError, match="echo is not served in streams"):
        text(server, TEXTS[0], echo=True, stream=True)


def test_an_echo_has_the_token_that_ends_the_answer(alone):
    """Who scores a text takes one token off the end, whichever it is."""
    ids, end = alone.tokenizer.encode(TEXTS[0]), alone.tokenizer.of_transformers.eos_token_id
    scores = {token: TokenLogprobs(token, -float(token), ()) for token in (*ids, 5, end)}
    prompt = [None, *(scores[token] for token in ids[1:])]
    result = GenerationResult(
        0, ids, [5, end], "stop", 0, 0, SamplingParams(), 0, "", 0, [scores[5], scores[end]], prompt
    )
    for echo, tokens in ((False, [5]), (True, [*ids, 5, end])):
        given = scored_tokens(result, alone.tokenizer, {end}, echo=echo)
        assert [each.token for each in given] == tokens
        assert all(each.scores is scores[each.token] for each in given[echo:])
    assert given[0].scores is None and given[-1].offset == len(alone.tokenizer.decode([*ids, 5]))


def test_what_the_queue_never_holds_is_refused_before_it_is_read(server):
    most = server.model.engine.most_requests
    with pytest.raises(openai.BadRequestError, match=f"at most {most} answers .*, got {most + 1}"):
        text(server, ["x"] * (most + 1))
    with pytest.raises(openai.BadRequestError, match=f"got {2 * most}"):
        text(server, [[5]] * most, n=2)


def test_what_cannot_be_served_of_several_leaves_none_open(server):
    before = server.model.llm.engine.report().generated_tokens
    for prompts in ([[5], [9999]], [[5], [5] * 300]):
        with pytest.raises(openai.BadRequestError):
            text(server, prompts, max_tokens=100)
    server.wait_idle()
    assert server.model.llm.engine.report().generated_tokens == before
