"""Several answers to a request and log-probabilities, as the official client reads them."""

from __future__ import annotations

import asyncio
import json

import pytest

from compiled_attn.engine import SamplingParams
from compiled_attn.serve.choices import merged_streams
from compiled_attn.text import LLM
from tests.compiled_attn.serve.conftest import NAME, Running

CHAT = [{"role": "user", "content": "What is on the moon?"}]
DRAWN = {"temperature": 1.5, "seed": 5}


def alone_answers(alone: LLM, prompt: object, **more: object):
    return alone.generate([prompt], SamplingParams(max_new_tokens=12, **DRAWN, **more))


def chat(server: Running, **more: object):
    settings = {"model": NAME, "messages": CHAT, "max_tokens": 12, **DRAWN, **more}
    return server.client.chat.completions.create(**settings)


def text(server: Running, **more: object):
    settings = {"model": NAME, "prompt": "over the sea", "max_tokens": 12, **DRAWN, **more}
    return server.client.completions.create(**settings)


def test_several_answers_are_those_of_the_seeds_that_follow(server: Running, alone: LLM):
    want = [each.text for each in alone_answers(alone, CHAT, n=3)]
    assert len({*want}) == 3
    given = chat(server, n=3)
    assert [(each.index, each.message.content) for each in given.choices] == [*enumerate(want)]
    assert given.usage.completion_tokens == 36
    assert given.usage.prompt_tokens == len(alone.tokenizer.encode(CHAT))
    assert given.usage.total_tokens == given.usage.prompt_tokens + 36
    want = [each.text for each in alone_answers(alone, "over the sea", n=3)]
    assert [each.text for each in text(server, n=3).choices] == want


def test_streams_of_several_answers_say_whose_each_piece_is(server: Running, alone: LLM):
    told, ends, usages = ["", "", ""], {}, []
    for chunk in chat(server, n=3, stream=True):
        for choice in chunk.choices:
            told[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
        usages += [chunk.usage] if chunk.usage else []
    assert told == [each.text for each in alone_answers(alone, CHAT, n=3)]
    assert ends == {0: "length", 1: "length", 2: "length"}
    assert [each.completion_tokens for each in usages] == [36]
    told = ["", ""]
    for chunk in text(server, n=2, stream=True):
        told[chunk.choices[0].index] += chunk.choices[0].text
    assert told == [each.text for each in alone_answers(alone, "over the sea", n=2)]


def test_a_reader_of_several_streams_that_goes_away_leaves_no_request(server: Running):
    chunks = chat(server, n=4, stream=True, max_tokens=200)
    next(iter(chunks))
    chunks.close()
    for _ in range(500):
        if not server.served.llm.engine.open_requests:
            break
        server.get("/health")
    assert not server.served.llm.engine.open_requests


@pytest.mark.parametrize("n", [1, 2])
def test_a_chat_tells_log_probabilities_whole_and_as_a_stream(server: Running, alone: LLM, n: int):
    tokenizer = alone.tokenizer
    want = alone_answers(alone, CHAT, n=n, logprobs=2)
    whole = chat(server, n=n, logprobs=True, top_logprobs=2).choices
    streamed: list[list] = [[] for _ in range(n)]
    for chunk in chat(server, n=n, logprobs=True, top_logprobs=2, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.logprobs.content if choice.logprobs else []
    for at, answer in enumerate(want):
        scores = answer.result.logprobs
        for given in (whole[at].logprobs.content, streamed[at]):
            assert [each.token for each in given] == [tokenizer.text_of(e.token) for e in scores]
            assert [each.logprob for each in given] == pytest.approx(
                [each.logprob for each in scores], abs=1e-4
            )
            for own, each in zip(given, scores, strict=True):
                assert [t.token for t in own.top_logprobs] == [
                    tokenizer.text_of(token) for token, _ in each.top
                ]
                assert own.bytes == [*own.token.encode()]
    plain = chat(server, logprobs=True).choices[0].logprobs.content
    assert [each.top_logprobs for each in plain] == [[]] * 12
    assert chat(server).choices[0].logprobs is None


def test_a_text_tells_log_probabilities_whole_and_as_a_stream(server: Running, alone: LLM):
    (want,) = alone_answers(alone, "over the sea", logprobs=3)
    whole = text(server, logprobs=3).choices[0].logprobs
    parts = [chunk.choices[0].logprobs for chunk in text(server, logprobs=3, stream=True)]
    parts = [part for part in parts if part is not None]
    names = [alone.tokenizer.text_of(each.token) for each in want.result.logprobs]
    assert whole.tokens == [name for part in parts for name in part.tokens] == names
    values = [each.logprob for each in want.result.logprobs]
    assert whole.token_logprobs == pytest.approx(values, abs=1e-4)
    assert [v for part in parts for v in part.token_logprobs] == pytest.approx(values, abs=1e-4)
    assert whole.text_offset == [len("".join(names[:at])) for at in range(len(names))]
    for each, own in zip(want.result.logprobs, whole.top_logprobs, strict=True):
        assert {*own} == {alone.tokenizer.text_of(token) for token, _ in each.top}


def test_the_first_stream_that_fails_ends_all():
    async def told(*events: str):
        for event in events:
            yield event

    async def failing():
        yield 'data: {"choices": [{}]}\n\n'
        raise RuntimeError("torn")

    async def read(*streams):
        return [json.loads(each[6:]) async for each in merged_streams([*streams])]

    error = told('data: {"error": "too long"}\n\n')
    assert asyncio.run(read(error, told()))[-1] == {"error": "too long"}
    with pytest.raises(RuntimeError, match="torn"):
        asyncio.run(read(failing(), told()))
