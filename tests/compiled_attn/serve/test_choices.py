"""Several answers to a request and log-probabilities, as the official client reads them."""

from __future__ import annotations

import asyncio
import json
import urllib.request

import openai
import pytest

from compiled_attn.engine import GenerationResult, SamplingParams
from compiled_attn.serve.chat import usage_of
from compiled_attn.serve.endpoint import Endpoint
from compiled_attn.serve.streaming import merge_streams
from compiled_attn.text import LLM, AnswerPieces
from tests.compiled_attn.serve.conftest import CONFIG, NAME, Running
from tests.compiled_attn.text.models import SPECIAL

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


def test_several_answers_are_those_of_the_seeds_that_follow(server, alone):
    want = [each.text for each in alone_answers(alone, CHAT, n=3)]
    assert len({*want}) == 3
    given = chat(server, n=3)
    assert [(each.index, each.message.content) for each in given.choices] == [*enumerate(want)]
    assert given.usage.completion_tokens == 36
    assert given.usage.prompt_tokens == len(alone.tokenizer.encode(CHAT))
    assert given.usage.total_tokens == given.usage.prompt_tokens + 36
    want = [each.text for each in alone_answers(alone, "over the sea", n=3)]
    assert [each.text for each in text(server, n=3).choices] == want


def test_streams_of_several_answers_say_whose_each_piece_is(server, alone):
    texts, ends = ["", "", ""], {}
    for chunk in chat(server, n=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert texts == [each.text for each in alone_answers(alone, CHAT, n=3)]
    assert ends == {0: "length", 1: "length", 2: "length"}
    texts = ["", ""]
    for chunk in text(server, n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [each.text for each in alone_answers(alone, "over the sea", n=2)]


@pytest.mark.parametrize("n", [1, 2])
def test_a_chat_has_log_probabilities_whole_and_as_a_stream(server, alone, n):
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
            shown = [each.bytes for each in given if each.token not in SPECIAL]
            text = bytes(byte for each in shown for byte in each)
            assert text.decode(errors="replace") == answer.text
    plain = chat(server, logprobs=True).choices[0].logprobs.content
    assert [each.top_logprobs for each in plain] == [[]] * 12
    assert chat(server).choices[0].logprobs is None


def test_a_text_has_log_probabilities_whole_and_as_a_stream(server, alone):
    (want,) = alone_answers(alone, "over the sea", logprobs=3)
    whole = text(server, logprobs=3).choices[0].logprobs
    parts = [chunk.choices[0].logprobs for chunk in text(server, logprobs=3, stream=True)]
    parts = [part for part in parts if part is not None]
    names = [alone.tokenizer.text_of(each.token) for each in want.result.logprobs]
    assert whole.tokens == [name for part in parts for name in part.tokens] == names
    values = [each.logprob for each in want.result.logprobs]
    assert whole.token_logprobs == pytest.approx(values, abs=1e-4)
    assert [v for part in parts for v in part.token_logprobs] == pytest.approx(values, abs=1e-4)
    before = [want.result.tokens[:at] for at in range(len(names))]
    offsets = [len(alone.tokenizer.decode(each).rstrip("\ufffd")) for each in before]
    assert whole.text_offset == [at for part in parts for at in part.text_offset] == offsets
    for each, own in zip(want.result.logprobs, whole.top_logprobs, strict=True):
        assert {*own} == {alone.tokenizer.text_of(token) for token, _ in each.top}


LETTERS = "\u4f60 on\U0001f389the"


def spelt(alone: LLM) -> dict[str, object]:
    """What makes an answer the letters: of a grammar, so that the model has no choice."""
    pytest.importorskip("xgrammar", reason="needs the extra 'grammar'")
    schema = {"const": LETTERS}
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"max_tokens": 60, "extra_body": {"response_format": format_}}


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_within_a_character_have_its_bytes_and_its_place(server, alone, stream):
    settings = {"logprobs": 1, "stream": stream, **spelt(alone)}
    given = text(server, **settings)
    parts = [each.choices[0] for each in given] if stream else [given.choices[0]]
    whole = "".join(part.text for part in parts)
    assert whole == json.dumps(LETTERS, ensure_ascii=False)
    scores = [part.logprobs for part in parts if part.logprobs]
    offsets = [at for part in scores for at in part.text_offset]
    names = [name for part in scores for name in part.tokens]
    for at, name in zip(offsets, names, strict=True):
        assert whole.startswith(name, at) or (name == "\ufffd" and ord(whole[at]) > 127)
    assert max(map(offsets.count, offsets)) == 4 - ("\U0001f389" in names)  # a token a byte
    settings = {"logprobs": True, **spelt(alone)}
    chunks = chat(server, stream=stream, **settings)
    choices = [c.choices[0] for c in chunks] if stream else [chunks.choices[0]]
    own = [each.bytes for c in choices if c.logprobs for each in c.logprobs.content]
    assert bytes(byte for each in own for byte in each).decode() == whole


def events_of(server: Running, path: str, **body: object) -> list[str]:
    """The data of each event of a stream, as it is on the wire."""
    request = urllib.request.Request(
        f"{server.url}/v1/{path}",
        json.dumps({"model": NAME, "stream": True, "max_tokens": 4, **body}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        events = answer.read().decode().split("\n\n")
    assert events.pop() == "" and all(each.startswith("data: ") for each in events)
    return [each.removeprefix("data: ") for each in events]


ASKED = {"completions": {"prompt": "over the sea"}, "chat/completions": {"messages": CHAT}}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("path", ASKED)
def test_a_stream_says_that_it_is_done_and_what_it_used_if_asked(server, path, n):
    *chunks, end = events_of(server, path, n=n, **ASKED[path])
    assert end == "[DONE]"
    assert all("usage" not in (parsed := json.loads(each)) and parsed["choices"] for each in chunks)
    options = {"include_usage": True}
    *chunks, last, end = events_of(server, path, n=n, stream_options=options, **ASKED[path])
    parsed, usage = [*map(json.loads, chunks)], json.loads(last)
    assert (
        end == "[DONE]" and usage["choices"] == [] and usage["usage"]["completion_tokens"] == 4 * n
    )
    assert usage["id"] == parsed[0]["id"]
    assert all(each["choices"] and "usage" not in each for each in parsed)


def test_several_answers_are_taken_as_a_whole_or_refused_as_a_whole(server):
    owner = server.model.engine._owner
    before, room = owner._max_waiting, server.model.engine.engine.config.max_seqs
    tokens = server.model.llm.engine.report().generated_tokens
    owner._max_waiting = 0
    try:
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError, match="9 more that belong together"):
                chat(server, n=room + 1, stream=stream)
        assert len(chat(server, n=room, max_tokens=1).choices) == room
    finally:
        owner._max_waiting = before
    assert server.model.llm.engine.report().generated_tokens == tokens + room


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_compute_their_prompt_once(server, stream):
    own = {"X-Cache-Salt": f"once {stream}"}
    before = server.model.llm.engine.report()
    given = chat(server, n=4, max_tokens=2, extra_headers=own, stream=stream)
    assert [*given]
    after = server.model.llm.engine.report()
    prompt = len(server.model.llm.tokenizer.encode(CHAT))
    assert after.prompt_tokens - before.prompt_tokens == 4 * prompt
    # The others compute no block of it, but the last token, and the second of each answer.
    assert after.computed_tokens - before.computed_tokens <= prompt + 3 * CONFIG.block_size + 4


def test_usage_of_several_prompts_counts_each_once():
    """Two answers each to prompts of 5 and of 300 tokens, of which 2 and 40 were cached."""
    given = [(5, 2, 10), (5, 4, 20), (300, 40, 30), (300, 299, 40)]
    results = [
        GenerationResult(
            0, [1] * prompt, [1] * own, "stop", 0, 0, SamplingParams(), 0, cached_tokens=cached
        )
        for prompt, cached, own in given
    ]
    usage = usage_of(results, 2)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (305, 100, 405)
    assert usage.prompt_tokens_details.cached_tokens == 42


def test_the_first_stream_that_fails_ends_all():
    waiting = asyncio.Event()

    async def failing():
        yield "a"
        raise RuntimeError("torn")

    async def endless():
        try:
            await asyncio.Event().wait()
            yield ""
        finally:
            waiting.set()

    async def main():
        events = []
        with pytest.raises(RuntimeError, match="torn"):
            async for event in merge_streams([failing(), endless()]):
                events.append(event)
        await asyncio.wait_for(waiting.wait(), 60)
        return events

    assert asyncio.run(main()) == ["a"]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(("owner", "name"), [(AnswerPieces, "put"), (Endpoint, "_events")])
def test_an_error_in_a_stream_is_its_last_event(server, monkeypatch, path, n, owner, name):
    def fail(*args):
        raise RuntimeError("torn")

    monkeypatch.setattr(owner, name, fail)
    *_, error, end = events_of(server, path, n=n, **ASKED[path])
    assert json.loads(error)["error"]["message"] == "torn" and end == "[DONE]"
