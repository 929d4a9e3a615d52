"""A server on a free port in a thread of the test, and the official client of OpenAI."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'serve'")

import openai
import uvicorn

from compiled_attn.engine import EngineConfig
from compiled_attn.serve.app import create_app
from compiled_attn.serve.model import LoadModel, ServedModel
from compiled_attn.serve.server import listen
from compiled_attn.serve.settings import ServerSettings
from compiled_attn.text import LLM
from tests.compiled_attn.text.models import save_chat_model

NAME = "tiny"


@dataclass
class Running:
    """A server that runs: its model, its address, and a client."""

    model: ServedModel
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
        while self.model.stage != stage:
            assert time.monotonic() < until, self.model.stage
            assert self.model.error is None, self.model.error
            time.sleep(0.01)

    def wait_idle(self, seconds: float = 60) -> None:
        """Until no request is open."""
        until = time.monotonic() + seconds
        while self.model.open_requests or self.model.llm.engine.open_requests:
            assert time.monotonic() < until
            time.sleep(0.01)


@contextlib.contextmanager
def running(load_model: LoadModel, settings: ServerSettings | None = None) -> Iterator[Running]:
    """A server of the model that `load_model` returns."""
    model, listening = ServedModel(NAME, load_model), listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(create_app(model, settings), log_level="error"))
    model.start(lambda: None)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    try:
        yield Running(model, url, client)
    finally:
        server.should_exit = True
        thread.join()
        gc.unfreeze()


@pytest.fixture(scope="session")
def chat_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


CONFIG = EngineConfig(
    backend="eager", max_seqs=8, max_tokens_per_step=64, block_size=8, num_blocks=200, max_graphs=6
)


@pytest.fixture(scope="session")
def server(chat_dir: Path) -> Iterator[Running]:
    with running(lambda progress: LLM(chat_dir, CONFIG, progress=progress)) as one:
        one.wait()
        yield one


@pytest.fixture(scope="session")
def alone(chat_dir: Path) -> LLM:
    """The same model without a server: what its answers must be."""
    return LLM(chat_dir, CONFIG)
