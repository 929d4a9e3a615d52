"""Fixtures of the tests of the command: it, a small model, a trace, and options for both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("typer", reason="needs the extra cli")
pytest.importorskip("transformers", reason="needs the extra hf")

from compiled_attn.cli import main
from tests.compiled_attn.cli.commands import Command, Completed
from tests.compiled_attn.text.models import save_chat_model, save_model


@pytest.fixture
def no_store_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compiled_attn.cli.store.default_store", lambda: tmp_path / "store")


@pytest.fixture
def command(no_store_at_home: None, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command as the console script does."""

    def run(*arguments: object) -> Completed:
        capsys.readouterr()
        with pytest.raises(SystemExit) as raised:
            main([str(argument) for argument in arguments])
        assert isinstance(raised.value.code, int)
        return Completed(raised.value.code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    save_model(path, vocab=256)
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    rows = [f"{0.001 * i:.3f},{20 + 3 * i},{18 + i}" for i in range(6)]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    return path


@pytest.fixture
def small(model_dir: Path, trace: Path) -> list[object]:
    """Options of a job that takes a second."""
    return [
        *("run", model_dir, "--trace", trace, "--backend", "eager"),
        *("--max-tokens-per-step", 32, "--max-seqs", 4, "--block-size", 8, "--max-graphs", 6),
    ]


@pytest.fixture(scope="session")
def chat_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a tokenizer and a chat template."""
    return save_chat_model(tmp_path_factory.mktemp("chat"))
