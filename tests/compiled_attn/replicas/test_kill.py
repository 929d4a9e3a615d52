"""Two replicas on Ray under load: one is killed, and no accepted request is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs the extra 'ray'")
pytest.importorskip("openai", reason="needs the extra 'serve'")

import openai

from compiled_attn.engine import EngineConfig, SamplingParams
from compiled_attn.text import LLM
from tests.compiled_attn.replicas.command import LIMITS, Command, left_of

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture
def command(model: Path, tmp_path: Path) -> Iterator[Command]:
    one = Command(model, tmp_path / "log")
    try:
        one.wait("ready, 2 of 2 replicas")
        yield one
    finally:
        one.end()


def prompts(count: int) -> list[str]:
    """Texts of which eight begin alike each."""
    return [f"{at % 8} " * 20 + f"number {at}" for at in range(count)]


async def answers(url: str, texts: list[str], tokens: int, when: dict[int, int]) -> list:
    """The answers, or the errors; after so many ended, such a process is killed."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=200)
    ended = 0

    async def one(text: str) -> object:
        nonlocal ended
        asked = {"model": "tiny", "prompt": text, "max_tokens": tokens}
        try:
            return (await client.completions.create(**asked)).choices[0].text
        except openai.OpenAIError as error:
            return error
        finally:
            ended += 1
            if ended in when:
                os.kill(when[ended], signal.SIGKILL)

    return await asyncio.gather(*map(one, texts))


def test_a_killed_replica_loses_no_request_and_changes_no_answer(command, model):
    texts = prompts(200)
    got = asyncio.run(answers(command.url, texts, 24, {40: command.replicas()[0]}))
    config = EngineConfig(backend="eager", **LIMITS)
    alone = LLM(model, config).generate(texts, SamplingParams(max_new_tokens=24))
    assert got == [each.text for each in alone]
    assert command.figure("compiled_attn_replicas_retried_requests_total") > 0
    command.wait("ready, 2 of 2 replicas", times=2)  # Ray has started it again
    assert command.figure("compiled_attn_replicas_restarts_total") == 1


def test_streams_that_had_begun_end_with_an_error_that_names_the_replica(command):
    client = openai.OpenAI(base_url=f"{command.url}/v1", api_key="none", max_retries=0)
    asked = {"model": "tiny", "max_tokens": 200, "stream": True}
    streams = [client.completions.create(prompt=text, **asked) for text in ("one", "two")]
    for stream in streams:
        next(stream)
    for process in command.replicas():
        os.kill(process, signal.SIGKILL)
    for stream in streams:
        with pytest.raises(openai.APIError, match=r"replica [01] ended while it streamed"):
            list(stream)


def test_a_signal_lets_what_was_asked_be_answered_and_ends_all(command):
    family = command.family()

    async def both() -> list:
        asking = asyncio.ensure_future(answers(command.url, prompts(8), 100, {}))
        await asyncio.sleep(0.5)
        command.process.send_signal(signal.SIGTERM)
        return await asking

    assert all(isinstance(each, str) for each in asyncio.run(both()))
    assert command.process.wait(60) == 0, command.said
    assert "Traceback" not in command.said
    assert not left_of(family)
