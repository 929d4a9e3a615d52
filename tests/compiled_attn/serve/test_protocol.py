"""The server as the official client of OpenAI meets it; answers are those of the model alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from compiled_attn.engine import SamplingParams
from compiled_attn.text import LLM
from tests.compiled_attn.serve.conftest import CONFIG, NAME, Running

CHAT = [{"role": "user", "content": "What is on the moon?"}]


def create_chat(server: Running, **more):
    settings = {"model": NAME, "messages": CHAT, "max_tokens": 12, **more}
    return server.client.chat.completions.create(**settings)


def answered(alone: LLM, prompt, **more) -> str:
    settings = {"max_new_tokens": 12, **more}
    return alone.generate([prompt], SamplingParams(**settings))[0].text


def test_a_chat_is_answered_as_the_model_alone_does(server, alone):
    answer = create_chat(server)
    assert answer.choices[0].message.content == answered(alone, CHAT)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens == len(alone.tokenizer.encode(CHAT))


def test_the_pieces_of_a_stream_are_the_same_answer(server, alone):
    options = {"include_usage": True}
    *chunks, last = create_chat(server, stream=True, max_tokens=40, stream_options=options)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answered(alone, CHAT, max_new_tokens=40)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.usage.completion_tokens == 40
    assert len(chunks) > 3


def test_a_response_that_reached_its_limit_is_incomplete(server, alone):
    text = answered(alone, CHAT, max_new_tokens=12)
    settings = {"model": NAME, "input": CHAT[0]["content"], "max_output_tokens": 12}
    whole = server.client.responses.create(**settings)
    assert whole.output_text == text
    assert (whole.status, whole.output[0].status) == ("incomplete", "incomplete")
    assert whole.incomplete_details.reason == "max_output_tokens"
    *events, last = server.client.responses.create(**settings, stream=True)
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == text
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert last.response.output_text == text


def test_a_response_that_stopped_is_complete(server):
    pytest.importorskip("xgrammar", reason="needs the extra 'grammar'")
    json_only = {"format": {"type": "json_schema", "name": "x", "schema": {"const": 5}}}
    settings = {"model": NAME, "input": CHAT[0]["content"], "text": json_only}
    for stream in (False, True):
        given = server.client.responses.create(**settings, stream=stream)
        response = [*given][-1].response if stream else given
        assert (response.status, response.output[0].status) == ("completed", "completed")
        assert response.output_text == "5" and response.incomplete_details is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["chat", "text", "response"])
def test_usage_counts_the_tokens_that_were_cached(server, kind, stream):
    said = f"{kind} {stream}, and then enough for some blocks of eight tokens"
    chat = [{"role": "user", "content": said}]
    create = {
        "chat": lambda **more: server.client.chat.completions.create(messages=chat, **more),
        "text": lambda **more: server.client.completions.create(prompt=said, **more),
        "response": lambda **more: server.client.responses.create(input=said, **more),
    }
    more = {"max_output_tokens": 2} if kind == "response" else {"max_tokens": 2}
    if stream:
        more["stream"] = True
        if kind != "response":
            more["stream_options"] = {"include_usage": True}

    def cached() -> tuple[int, int]:
        given = create[kind](model=NAME, **more)
        last = [*given][-1] if stream else given
        if kind == "response":
            usage = (last.response if stream else last).usage
            return usage.input_tokens_details.cached_tokens, usage.input_tokens
        return last.usage.prompt_tokens_details.cached_tokens, last.usage.prompt_tokens

    first, prompt = cached()
    assert first <= CONFIG.block_size  # what all prompts of a template begin with
    assert prompt - CONFIG.block_size <= cached()[0] < prompt


def test_the_model_is_found_by_its_name(server):
    assert server.client.models.retrieve(NAME).id == NAME
    assert [each.id for each in server.client.models.list()] == [NAME]
    with pytest.raises(openai.NotFoundError, match="expected the model 'tiny', got 'other/one'"):
        server.client.models.retrieve("other/one")


def test_every_request_has_a_sampling_of_its_own(server, alone):
    sampled = {"temperature": 1.5, "top_p": 0.9, "seed": 7}
    assert create_chat(server, **sampled).choices[0].message.content == answered(
        alone, CHAT, **sampled
    )
    few = {"temperature": 1.0, "top_k": 3, "seed": 1}
    more = {"temperature": 1.0, "seed": 1, "extra_body": {"top_k": 3}}
    assert create_chat(server, **more).choices[0].message.content == answered(alone, CHAT, **few)


def test_a_stop_string_ends_the_answer_before_it(server, alone):
    text = answered(alone, CHAT, max_new_tokens=40)
    stop = text[10:12]
    want = answered(alone, CHAT, max_new_tokens=40, stop=(stop,))
    whole = create_chat(server, max_tokens=40, stop=stop)
    assert whole.choices[0].message.content == want == text[: text.index(stop)]
    assert whole.choices[0].finish_reason == "stop"
    chunks = create_chat(server, max_tokens=40, stop=[stop], stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == want


def test_streams_at_once_get_their_own_answers_although_others_leave(server, alone):
    def stream(number: int) -> str:
        messages = [{"role": "user", "content": f"number {number}"}]
        chunks = create_chat(server, messages=messages, max_tokens=8, stream=True)
        if number % 2:  # some leave at once, some after a few chunks
            for _ in zip(range(number // 16), chunks, strict=False):
                pass
            chunks.close()
            return ""
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with ThreadPoolExecutor(64) as pool:
        got = [*pool.map(stream, range(64))][::2]
    chats = [[{"role": "user", "content": f"number {number}"}] for number in range(0, 64, 2)]
    want = alone.chat(chats, SamplingParams(max_new_tokens=8))
    assert got == [each.text for each in want]
    server.wait_idle()


@pytest.mark.parametrize("n", [1, 4])
def test_a_client_that_goes_away_leaves_no_request_and_no_block(server, n):
    chunks = create_chat(server, stream=True, max_tokens=200, n=n)
    next(iter(chunks))
    chunks.close()
    server.wait_idle()
    assert not _figure(server, "requests_running") and not _figure(server, "blocks_used")


def test_a_second_turn_finds_the_first_ones_blocks_but_no_other_tenants(server):
    first = [{"role": "user", "content": "Once upon a time there was a moon over the sea."}]
    turn = create_chat(server, messages=first).choices[0].message.content
    second = [*first, {"role": "assistant", "content": turn}, {"role": "user", "content": "On!"}]
    before = _hits(server)
    create_chat(server, messages=second)
    assert _hits(server) > before
    before = _hits(server)
    create_chat(server, messages=second, extra_headers={"X-Cache-Salt": "another tenant"})
    assert _hits(server) == before


def test_what_is_null_is_left_out(server, alone):
    said = {"role": "assistant", "content": "x", "tool_calls": None, "name": None}
    messages = [*CHAT, said, *CHAT]
    nulls = {"stop": None, "seed": None, "tools": None, "chat_template_kwargs": None}
    answer = create_chat(server, messages=messages, extra_body=nulls).choices[0].message.content
    assert answer == answered(alone, [*CHAT, {"role": "assistant", "content": "x"}, *CHAT])
    stream = server.client.responses.create(
        model=NAME, input="hi", stream=True, max_output_tokens=4, parallel_tool_calls=None
    )
    assert [*stream][-1].type == "response.incomplete"


def test_the_turns_of_a_tool_are_taken(server):
    items = [
        {"role": "user", "content": "What time is it?"},
        {"type": "function_call", "call_id": "1", "name": "clock", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "noon"},
    ]
    assert server.client.responses.create(model=NAME, input=items, max_output_tokens=4).output_text


def test_an_end_with_the_last_token_is_a_stop(server, alone):
    text = answered(alone, CHAT, max_new_tokens=6)
    first = alone.generate([CHAT], SamplingParams(max_new_tokens=6, stop=(text[-1],)))[0]
    count = len(first.result.tokens)
    settings = {"max_tokens": count, "stop": text[-1]}
    assert create_chat(server, **settings).choices[0].finish_reason == "stop"
    assert [*create_chat(server, **settings, stream=True)][-1].choices[0].finish_reason == "stop"


def test_least_tokens_need_no_limit(server):
    stop = {"extra_body": {"min_tokens": 20, "ignore_eos": True}}
    answer = server.client.completions.create(model=NAME, prompt="x" * 200, **stop)
    assert answer.usage.completion_tokens == 56  # what the context of 256 has room for


def test_a_client_that_does_not_wait_for_a_whole_answer_leaves_no_request(server):
    impatient = server.client.with_options(timeout=0.3)
    with pytest.raises(openai.APITimeoutError):
        for _ in range(100):  # the machine may be fast
            impatient.completions.create(
                model=NAME, prompt="the moon", max_tokens=240, extra_body={"ignore_eos": True}
            )
    server.wait_idle()


PARSED = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<model>",
    "fields": {"content": {"close": "<end>", "content": "text"}},
}


@pytest.mark.parametrize("tokens", [4, 9, 24])
def test_a_parser_gets_all_of_a_stream(server, monkeypatch, tokens):
    monkeypatch.setattr(
        server.model.llm.tokenizer.of_transformers, "response_template", PARSED, raising=False
    )
    whole = create_chat(server, max_tokens=tokens).choices[0].message.content
    chunks = create_chat(server, max_tokens=tokens, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    with pytest.raises(openai.BadRequestError, match="stop is not served in chats"):
        create_chat(server, stop="x")


def _figure(server: Running, name: str) -> float:
    _, text = server.get("/metrics")
    line = next(each for each in text.splitlines() if each.startswith(f"compiled_attn_{name}{{"))
    return float(line.split()[-1])


def _hits(server: Running) -> int:
    return server.model.llm.engine.memory.stats().hit_tokens
