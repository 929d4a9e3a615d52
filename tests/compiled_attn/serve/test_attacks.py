"""Hostile clients: they get an error, and no other client waits for them."""

from __future__ import annotations

import gc
import http.client
import json
import threading
from urllib.parse import urlsplit

import openai
import pytest

from compiled_attn.serve.settings import MAX_BODY
from tests.compiled_attn.serve.conftest import NAME, Running

SAID = [{"role": "user", "content": "hello"}]


def connected(server: Running) -> http.client.HTTPConnection:
    url = urlsplit(server.url)
    return http.client.HTTPConnection(url.hostname, url.port, timeout=60)


def posted(server: Running, body, path: str = "/v1/completions", **more) -> tuple[int, dict]:
    connection = connected(server)
    headers = {"Content-Type": "application/json", **more.pop("headers", {})}
    connection.request("POST", path, body, headers, **more)
    answer = connection.getresponse()
    got = json.loads(answer.read())
    connection.close()
    return answer.status, got


def test_a_body_that_is_too_large_is_refused_by_its_length(server):
    connection = connected(server)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Length", str(MAX_BODY + 1))
    connection.endheaders()  # no byte of the body is sent
    answer = connection.getresponse()
    error = json.loads(answer.read())["error"]
    assert answer.status == 413
    assert f"at most {MAX_BODY:,} bytes" in error["message"]
    assert error["type"] == "invalid_request_error"


def test_a_chunked_body_is_refused_as_soon_as_it_is_too_large(server):
    status, got = posted(server, (b"x" * 2**16 for _ in range(100)), encode_chunked=True)
    assert status == 413
    assert "--max-body" in got["error"]["message"]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"messages": 5},
        {"bos_token": {}},
        {"add_generation_prompt": [1]},
        {"self": 1},
        {"kwargs": 1},
        {"processor": 1},
        {"return_tensors": "x"},
        {"range": 5},
        {"load_audio_from_video": 3},
        {"images": [1]},
        {"": 1},
        {"x": {"y": [None, 5]}},
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_no_template_argument_is_an_error_of_the_server(server, kwargs, path):
    prompt = {"messages": SAID} if "chat" in path else {"input": "hello"}
    most = "max_tokens" if "chat" in path else "max_output_tokens"
    body = {"model": NAME, **prompt, most: 2, "chat_template_kwargs": kwargs}
    status, got = posted(server, json.dumps(body), path)
    assert status in (200, 400), got


ODD = [True, -1, 1.5, 1e308, 10**30, "", "x", "\x00", [], [[]], [None], {}, {"a": [{}]}]


@pytest.mark.parametrize("odd", ODD, ids=[*map(str, range(len(ODD)))])
@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_no_value_in_any_field_is_an_error_of_the_server(server, odd, path):
    base = {
        "chat/completions": {"messages": SAID, "max_tokens": 1},
        "completions": {"prompt": "x", "max_tokens": 1},
        "responses": {"input": "x", "max_output_tokens": 1},
    }[path]
    own = ("metadata", "user", "n", "logprobs", "top_logprobs", "stop", "seed", "temperature",
           "top_p", "top_k", "min_p", "logit_bias", "stream_options", "response_format", "tools",
           "tool_choice", "text", "instructions", "echo", "suffix", "best_of", "model", "store",
           "parallel_tool_calls", "min_tokens", "ignore_eos", "repetition_penalty", "include",
           "presence_penalty", "frequency_penalty", "reasoning", "truncation",
           "chat_template_kwargs")  # fmt: skip
    for name in (*own, *base):
        status, got = posted(server, json.dumps({"model": NAME, **base, name: odd}), f"/v1/{path}")
        assert status < 500, (name, odd, got)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": {"a": 1}},
        {"role": "user", "content": ["x"]},
        {"role": "user", "content": [{"type": "text", "text": None}]},
        {"role": 5, "content": "x"},
        {"role": "moon", "content": "x"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "5"}}]},
        {"role": "tool", "content": "x", "tool_call_id": 5},
        "x",
        None,
    ],
)
def test_no_message_is_an_error_of_the_server(server, message):
    body = json.dumps({"model": NAME, "messages": [message], "max_tokens": 1})
    status, got = posted(server, body, "/v1/chat/completions")
    assert status in (200, 400), got


LARGE = {
    "numbers": b'{"prompt": [' + b"1," * 2_000_000 + b"1]}",
    "lists": b'{"prompt": [' + b"[]," * 1_300_000 + b"[]]}",
    "objects": b'{"messages": [' + b'{"a":1},' * 500_000 + b"1]}",
    "escapes": b'{"prompt": "' + b"\\n" * 2_000_000 + b'"}',
    "text": b'{"prompt": "' + b"a" * 4_000_000 + b'"}',
    "surrogates": b'{"prompt": "' + b"\\ud83d\\ude00" * 300_000 + b'"}',
    "no end": b'{"prompt": "' + b"a" * 4_000_000,
    "digits": b'{"prompt": ' + b"1" * 4_000_000 + b"}",
    "levels": b"[" * 4_000_000,
}
SOON_REFUSED = ("text", "no end", "digits", "levels")  # parsed while a single answer comes


@pytest.mark.parametrize("name", LARGE)
def test_large_bodies_are_refused_while_health_is_answered(server, name):
    """Between two answers there is no time in which the body could have been parsed at once."""
    done: list[tuple[int, dict]] = []
    answered, connection = 0, connected(server)
    asking = threading.Thread(target=lambda: done.append(posted(server, LARGE[name])))
    asking.start()
    while asking.is_alive():
        connection.request("GET", "/health")
        answer = connection.getresponse()
        assert answer.status == 200 and answer.read()
        answered += 1
    asking.join()
    ((status, got),) = done
    assert status == 400, got
    assert len(got["error"]["message"]) < 1000
    assert answered > 1 or name in SOON_REFUSED


def test_collections_of_garbage_leave_out_the_model(server):
    assert gc.get_freeze_count() > 10_000  # with it, one took 0.5 s, in which nothing was answered


def test_a_client_that_sends_its_body_slowly_holds_up_nobody(server):
    slow = connected(server)
    slow.putrequest("POST", "/v1/completions")
    slow.putheader("Content-Length", "1000")
    slow.endheaders(b'{"prompt"')
    assert server.client.completions.create(model=NAME, prompt="x", max_tokens=2).choices
    assert server.get("/health")[0] == 200
    slow.close()


def test_clients_that_leave_at_once_leave_no_request(server):
    body = json.dumps({"model": NAME, "messages": SAID, "max_tokens": 200, "stream": True})
    for _ in range(20):
        gone = connected(server)
        gone.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        gone.close()
    server.wait_idle()
    assert server.client.completions.create(model=NAME, prompt="x", max_tokens=2).choices


def test_huge_headers_and_broken_lines_are_refused(server):
    with pytest.raises(openai.APIError):
        server.client.completions.create(
            model=NAME, prompt="x", extra_headers={"X-Cache-Salt": "a" * 200_000}
        )
    assert server.get("/health")[0] == 200
