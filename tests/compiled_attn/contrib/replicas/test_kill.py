"""Two replicas on Ray under load: one is killed, and no accepted request is lost."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs the extra 'ray'")
pytest.importorskip("openai", reason="needs the extra 'serve'")

import openai

from compiled_attn.engine import EngineConfig, SamplingParams
from compiled_attn.text import LLM
from tests.compiled_attn.contrib.replicas.command import LIMITS, Command, still_running
from tests.compiled_attn.contrib.replicas.faulty import FAILING

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture
def command(model: Path, tmp_path: Path) -> Iterator[Command]:
    one = Command(model, tmp_path / "log")
    try:
        one.wait("ready, 2 of 2 replicas")
        yield one
    finally:
        one.stop()


def prompts(count: int) -> list[str]:
    """Texts of which eight begin alike each."""
    return [f"{at % 8} " * 20 + f"number {at}" for at in range(count)]


async def answers(
    url: str, texts: list[str], tokens: int, when: dict[int, Callable[[], object]]
) -> list:
    """The responses or errors; `when` maps a number of finished requests to an action."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=200)
    finished = 0

    async def one(text: str) -> object:
        nonlocal finished
        options = {"model": "tiny", "prompt": text, "max_tokens": tokens}
        try:
            return (await client.completions.create(**options)).choices[0].text
        except openai.OpenAIError as error:
            return error
        finally:
            finished += 1
            if finished in when:
                when[finished]()

    return await asyncio.gather(*map(one, texts))


def test_a_killed_replica_loses_no_request_and_changes_no_answer(command, model):
    texts = prompts(200)
    kill = partial(os.kill, command.replicas()[0], signal.SIGKILL)
    got = asyncio.run(answers(command.url, texts, 24, {40: kill}))
    config = EngineConfig(backend="eager", **LIMITS)
    alone = LLM(model, config).generate(texts, SamplingParams(max_new_tokens=24))
    assert got == [each.text for each in alone]
    assert command.metric("compiled_attn_replicas_retried_requests_total") > 0
    command.wait("ready, 2 of 2 replicas", times=2)  # Serve has started another one
    assert command.metric("compiled_attn_replicas_restarts_total") == 1


def test_an_engine_that_fails_is_replaced_and_loses_no_request(model, tmp_path):
    failing = shutil.copytree(model, tmp_path / "model") / FAILING
    module = "tests.compiled_attn.contrib.replicas.faulty"
    command = Command(failing.parent, tmp_path / "log", module=module)
    try:
        command.wait("ready, 2 of 2 replicas")
        fail = partial(failing.write_text, str(command.replicas()[0]))
        got = asyncio.run(answers(command.url, prompts(60), 24, {10: fail}))
        assert all(isinstance(each, str) for each in got)
        command.wait("ready, 2 of 2 replicas", times=2)
        assert command.metric("compiled_attn_replicas_restarts_total") == 1
    finally:
        command.stop()


def test_streams_that_had_begun_end_with_an_error_that_names_the_replica(command):
    client = openai.OpenAI(base_url=f"{command.url}/v1", api_key="none", max_retries=0)
    options = {"model": "tiny", "max_tokens": 200, "stream": True}
    streams = [client.completions.create(prompt=text, **options) for text in ("one", "two")]
    for stream in streams:
        next(stream)
    for process in command.replicas():
        os.kill(process, signal.SIGKILL)
    for stream in streams:
        with pytest.raises(openai.APIError, match=r"replica [01] exited while it streamed"):
            list(stream)


def test_a_signal_finishes_open_requests_and_stops_all_processes(command):
    processes = command.processes()

    async def both() -> list:
        asking = asyncio.ensure_future(answers(command.url, prompts(8), 100, {}))
        await asyncio.sleep(0.5)
        command.process.send_signal(signal.SIGTERM)
        return await asking

    assert all(isinstance(each, str) for each in asyncio.run(both()))
    assert command.process.wait(60) == 0, command.output
    assert "Traceback" not in command.output
    assert not still_running(processes)
