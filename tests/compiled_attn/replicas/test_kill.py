"""Two replicas on Ray under load: one is killed, and no accepted request is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("ray", reason="needs the extra 'ray'")
pytest.importorskip("openai", reason="needs the extra 'serve'")

import openai

from compiled_attn.engine import EngineConfig, SamplingParams
from compiled_attn.text import LLM
from tests.compiled_attn.text.models import byte_level, save_model, save_tokenizer

pytestmark = [pytest.mark.dist, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
LIMITS = {"max_seqs": 8, "block_size": 8, "num_blocks": 200, "max_graphs": 6}


class Command:
    """``serve --replicas 2`` in a process of its own, at a free port."""

    def __init__(self, folder: Path, log: Path, *more: str) -> None:
        limits = [f"--{name.replace('_', '-')}={size}" for name, size in LIMITS.items()]
        command = [sys.executable, "-m", "compiled_attn", "serve", f"--model={folder}", "--port=0"]
        command += ["--backend=eager", "--replicas=2", "--name=tiny", *limits, *more]
        settings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._log = log
        with log.open("w") as written:
            self.process = subprocess.Popen(
                command, env=settings, stdout=written, stderr=written, start_new_session=True
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    @property
    def url(self) -> str:
        return self.said.split(" at ")[1].split("/v1")[0]

    def get(self, path: str) -> str:
        try:
            with urllib.request.urlopen(self.url + path) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.read().decode()

    def wait(self, line: str, times: int = 1) -> None:
        until = time.monotonic() + 240
        while self.said.count(line) < times:
            assert self.process.poll() is None, self.said
            assert time.monotonic() < until, self.said
            time.sleep(0.05)

    def replicas(self) -> list[int]:
        """Their processes."""
        return [each["process"] for each in json.loads(self.get("/health"))["replicas"]]

    def figure(self, name: str) -> float:
        lines = self.get("/metrics").splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    save_model(folder)
    save_tokenizer(byte_level(), folder)
    return folder


@pytest.fixture
def command(model: Path, tmp_path: Path) -> Iterator[Command]:
    one = Command(model, tmp_path / "log")
    try:
        one.wait("ready, 2 of 2 replicas")
        yield one
    finally:
        with contextlib.suppress(ProcessLookupError):
            one.process.terminate()
        try:
            one.process.wait(60)
        except subprocess.TimeoutExpired:
            one.process.kill()


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
    replicas = command.replicas()

    async def both() -> list:
        asking = asyncio.ensure_future(answers(command.url, prompts(8), 100, {}))
        await asyncio.sleep(0.5)
        command.process.send_signal(signal.SIGTERM)
        return await asking

    assert all(isinstance(each, str) for each in asyncio.run(both()))
    assert command.process.wait(60) == 0, command.said
    assert "Traceback" not in command.said
    until = time.monotonic() + 30
    while any(Path(f"/proc/{each}").exists() for each in replicas):
        assert time.monotonic() < until
        time.sleep(0.1)
