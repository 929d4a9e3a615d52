"""The model that replicas serve in tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.compiled_attn.text.models import byte_level, save_model, save_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small random one."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    save_model(folder)
    save_tokenizer(byte_level(), folder)
    return folder
