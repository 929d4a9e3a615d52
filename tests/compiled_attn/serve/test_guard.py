"""API key, CORS, ids, version and access log of a server that has them switched on."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request

import openai
import pytest

from compiled_attn import __version__
from compiled_attn.serve.settings import ServerSettings
from compiled_attn.text import LLM
from tests.compiled_attn.serve.conftest import CONFIG, NAME, running

KEY, ORIGIN = "sk-moon", "https://chat.example"
SETTINGS = ServerSettings(api_key=KEY, cors_origins=(ORIGIN,), access_log=True, max_body=1000)


@pytest.fixture(scope="module")
def guarded(chat_dir):
    with running(lambda progress: LLM(chat_dir, CONFIG, progress=progress), SETTINGS) as one:
        one.wait()
        yield one


def client_of(guarded, key=KEY):
    return openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0)


@pytest.mark.parametrize("key", ["sk-other", "sk-moo", "sk-moonn", "é".encode().decode("latin-1")])
def test_another_key_is_refused_in_the_form_of_openai(guarded, key):
    request = urllib.request.Request(
        f"{guarded.url}/v1/models", headers={"Authorization": f"Bearer {key}"}
    )
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request)
    error = json.loads(raised.value.read())["error"]
    assert raised.value.code == 401
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert key not in error["message"] and KEY not in error["message"]


def test_without_a_key_only_health_is_answered(guarded):
    assert guarded.get("/health")[0] == 200
    for path in ("/v1/models", "/metrics", "/version", "/v1/nothing"):
        assert guarded.get(path)[0] == 401
    with pytest.raises(openai.AuthenticationError):
        client_of(guarded, "x").completions.create(model=NAME, prompt="x")


def test_the_key_opens_everything(guarded):
    assert client_of(guarded).completions.create(model=NAME, prompt="x", max_tokens=1).choices


def test_pages_of_an_allowed_origin_may_ask(guarded):
    headers = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    request = urllib.request.Request(
        f"{guarded.url}/v1/chat/completions", headers=headers, method="OPTIONS"
    )
    with urllib.request.urlopen(request) as answer:
        assert answer.headers["Access-Control-Allow-Origin"] == ORIGIN
    request.add_header("Origin", "https://other.example")
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(request)


def test_the_access_log_has_a_json_line_for_each_request(guarded, capsys):
    raw = client_of(guarded).chat.completions.with_raw_response.create(
        model=NAME,
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=5,
        extra_headers={"X-Request-Id": "mine-1"},
    )
    with pytest.raises(openai.APIStatusError):
        client_of(guarded).completions.create(model=NAME, prompt="x" * 2000)
    assert raw.headers["x-request-id"] == "mine-1"
    written = ""
    while written.count("\n") < 2:  # a line is written once the connection is done
        written += capsys.readouterr().out
        time.sleep(0.01)
    served, refused = map(json.loads, written.splitlines())
    assert served["id"] == raw.parse().id
    assert (served["request_id"], served["status"], served["tokens"]) == ("mine-1", 200, 5)
    assert 0 < served["ttft_s"] <= served["seconds"]
    assert (refused["status"], refused["path"]) == (413, "/v1/completions")
    assert "tokens" not in refused


def test_ids_are_those_of_openai(server):
    client, said = server.client, [{"role": "user", "content": "hello"}]
    for stream in (False, True):
        chat = client.chat.completions.create(
            model=NAME, messages=said, max_tokens=1, stream=stream
        )
        text = client.completions.create(model=NAME, prompt="x", max_tokens=1, stream=stream)
        response = client.responses.create(
            model=NAME, input="x", max_output_tokens=1, stream=stream
        )
        if stream:
            chat, text, response = next(iter(chat)), next(iter(text)), next(iter(response)).response
        assert chat.id.startswith("chatcmpl-") and text.id.startswith("cmpl-")
        assert response.id.startswith("resp_") and not response.id.startswith("resp_resp_")


def test_the_version_is_shown_and_no_page_loads_scripts_from_elsewhere(server):
    assert json.loads(server.get("/version")[1]) == {"version": __version__}
    assert {server.get(path)[0] for path in ("/docs", "/redoc", "/openapi.json")} == {404}
