"""Fixtures that several parts of graphs' tests share."""

from __future__ import annotations

import pytest
import torch

from graphs.store import ArtifactStore


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def store(tmp_path):
    """A store that is empty."""
    return ArtifactStore(tmp_path / "store")
