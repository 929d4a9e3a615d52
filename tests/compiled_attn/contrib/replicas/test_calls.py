"""Calls of replicas that go another way: clients that leave, mistakes, faults, more than fits."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray.serve", reason="needs the extra 'ray'")
pytest.importorskip("openai", reason="needs the extra 'serve'")

import openai

from tests.compiled_attn.contrib.replicas.command import Command

pytestmark = [pytest.mark.dist, pytest.mark.slow]

WORK = ("compiled_attn_requests_running", "compiled_attn_requests_waiting",
        "compiled_attn_blocks_used")  # fmt: skip

GENERATED = 'compiled_attn_tokens_total{kind="generated"'
LONG = {"model": "tiny", "prompt": "x", "max_tokens": 240, "n": 128}


@pytest.fixture(scope="module")
def command(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    one = Command(model, tmp_path_factory.mktemp("log") / "log")
    try:
        one.wait("ready, 2 of 2 replicas")
        yield one
    finally:
        one.stop()


def all_work_ends(command: Command, seconds: float = 20) -> bool:
    until = time.monotonic() + seconds
    while any(map(command.metric, WORK)):
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def test_a_client_that_leaves_frees_its_blocks(command):
    before = command.metric(GENERATED)
    body = json.dumps(LONG | {"stream": True}).encode()
    request = urllib.request.Request(
        f"{command.url}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        answer.readline()
    assert all_work_ends(command)
    assert command.metric(GENERATED) - before < LONG["n"] * LONG["max_tokens"] / 2


def test_clients_that_wait_for_a_whole_answer_may_leave_too(command):
    before = command.metric(GENERATED)
    client = openai.OpenAI(base_url=f"{command.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).completions.create(**LONG)
    assert all_work_ends(command)
    assert command.metric(GENERATED) - before < LONG["n"] * LONG["max_tokens"] / 2


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"model": "tiny", "prompt": "x" * 5000}, 400),
        ("/v1/completions", {"model": "tiny"}, 400),
        ("/v1/chat/completions", {"model": "other", "messages": []}, 400),
        ("/v1/nothing", {}, 404),
    ],
)
def test_a_bad_request_is_refused_once_and_restarts_nothing(command, path, body, status):
    processes = command.replicas()
    request = urllib.request.Request(
        command.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    assert caught.value.code == status and "error" in json.loads(caught.value.read())
    assert command.metric("compiled_attn_replicas_retried_requests_total") == 0
    assert command.replicas() == processes


def test_a_full_replica_responds_429(command):
    async def flood(count: int) -> list:
        client = openai.AsyncOpenAI(
            base_url=f"{command.url}/v1", api_key="none", max_retries=0, timeout=240
        )
        options = {"model": "tiny", "max_tokens": 1, "n": 128}
        every = (client.completions.create(prompt=f"{at}", **options) for at in range(count))
        return await asyncio.gather(*every, return_exceptions=True)

    got = asyncio.run(flood(40))
    refused = [each for each in got if isinstance(each, Exception)]
    assert all(isinstance(each, openai.RateLimitError) for each in refused), refused[:3]
    assert 0 < len(refused) < 40
    assert command.metric("compiled_attn_replicas_retried_requests_total") == 0
    assert all_work_ends(command)
