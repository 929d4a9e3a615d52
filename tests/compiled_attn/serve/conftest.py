"""A server on a free port in a thread of the test, and the official client of OpenAI."""

from __future__ import annotations

import contextlib
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

pytest.importorskip("fastapi", reason="needs the extra 'serve'")

import openai
import uvicorn

from compiled_attn.engine import EngineConfig
from compiled_attn.serve.app import app_of
from compiled_attn.serve.served import Make, Served
from compiled_attn.serve.server import bound
from compiled_attn.serve.settings import ServerSettings
from compiled_attn.text import LLM
from tests.compiled_attn.text.models import byte_level, save_model, save_tokenizer

NAME = "tiny"


@dataclass
class Running:
    """A server that runs: its model, its address, and a client."""

    served: Served
    url: str
    client: openai.OpenAI

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of a GET."""
        try:
            with urllib.request.urlopen(self.url + path) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def wait(self, stage: str = "ready", seconds: float = 60) -> None:
        """Until the model is that far."""
        until = time.monotonic() + seconds
        while self.served.stage != stage:
            assert time.monotonic() < until, self.served.stage
            assert self.served.error is None, self.served.error
            time.sleep(0.01)


@contextlib.contextmanager
def running(make: Make, settings: ServerSettings | None = None) -> Iterator[Running]:
    """A server of the model that `make` makes."""
    served, listening = Served(NAME, make), bound("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app_of(served, settings), log_level="error"))
    served.start(lambda: None)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    try:
        yield Running(served, url, client)
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="session")
def chat_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    torch.manual_seed(0)
    save_model(folder)
    save_tokenizer(byte_level(), folder)
    return folder


CONFIG = EngineConfig(
    backend="eager", max_seqs=8, max_tokens_per_step=64, block_size=8, num_blocks=200, max_graphs=6
)


@pytest.fixture(scope="session")
def server(chat_dir: Path) -> Iterator[Running]:
    with running(lambda told: LLM(chat_dir, CONFIG, progress=told)) as one:
        one.wait()
        yield one


@pytest.fixture(scope="session")
def alone(chat_dir: Path) -> LLM:
    """The same model without a server: what its answers must be."""
    return LLM(chat_dir, CONFIG)
