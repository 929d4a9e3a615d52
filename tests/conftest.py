"""Settings shared by all tests."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

settings.register_profile("project", deadline=None, derandomize=True)
settings.load_profile("project")


def pytest_configure(config: pytest.Config) -> None:
    """Share the cores between the processes of pytest-xdist, as each would take all of them."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine has no device for, with the reason."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("hpu") and not hasattr(torch, "hpu"):
        pytest.skip("needs an Intel Gaudi device")
