"""Fixtures of the tests of text: a directory with a small model, and what is made of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiled_attn import LLM
from compiled_attn.engine import EngineConfig
from compiled_attn.text import Tokenizer
from tests.compiled_attn.text.models import (
    byte_fallback,
    byte_level,
    save_chat_model,
    save_model,
    save_tokenizer,
)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def config() -> EngineConfig:
    return EngineConfig(
        backend="eager", max_seqs=4, max_tokens_per_step=32, block_size=8, max_graphs=4
    )


@pytest.fixture(scope="session")
def llm(model_dir: Path, config: EngineConfig) -> LLM:
    return LLM(model_dir, config)


@pytest.fixture(scope="session", params=["byte level", "byte fallback"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    made = byte_level() if request.param == "byte level" else byte_fallback()
    save_model(folder)  # transformers asks the configuration what kind of tokenizer it is
    save_tokenizer(made, folder)
    return Tokenizer(folder)
