"""Settings shared by all tests."""

from __future__ import annotations

import atexit
import gc
import os
import random
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings

# Before anything imports Triton: its kernels run on the CPU where there is no device for them.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Else a process that compiles starts others for Triton.
os.environ.setdefault("TORCH_WARM_POOL", "0")

settings.register_profile("quick", deadline=None, derandomize=True, max_examples=40)
settings.register_profile("all", settings.get_profile("quick"), max_examples=250)
settings.load_profile("quick")


def pytest_configure(config: pytest.Config) -> None:
    """Share the cores between the processes of pytest-xdist, as each would take all of them."""
    gc.disable()  # a quarter of the collection's time would go to looking through torch's modules
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    threads = max(1, torch.get_num_threads() // workers)
    torch.set_num_threads(threads)
    if workers > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # of processes that tests start


def pytest_collection_finish() -> None:
    """What is imported by now stays: the garbage collector needs not look at it."""
    gc.freeze()
    # The exit collects it, or nanobind reports Triton's objects as leaked; pytest's own five
    # collections before, each of seconds, need not.
    atexit.register(gc.unfreeze)
    gc.enable()
    gc.set_threshold(20_000, 20, 10)  # tracing and compiling make objects by the million


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Freeze what a file leaves, too: later collections took two seconds each for looking at it."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        gc.collect()
        gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine has no device for, with the reason."""
    _seed_all()  # before the fixtures of modules, which are set up before those of tests
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("hpu") and not hasattr(torch, "hpu"):
        pytest.skip("needs an Intel Gaudi device")


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Each test draws the same numbers, alone or after others."""
    _seed_all()


@pytest.fixture(autouse=True)
def _grad_mode_stays() -> Iterator[None]:
    before = torch.is_grad_enabled()
    yield
    after = torch.is_grad_enabled()
    torch.set_grad_enabled(before)
    assert after == before, "the test left torch's grad mode changed for those after it"


@pytest.fixture(autouse=True)
def _torch_features_stay() -> Iterator[None]:
    """A feature that a test breaks is probed again for those after it."""
    yield
    if (features := sys.modules.get("graphs.torch_internals.features")) is not None:
        for feature in features.all_features():
            if feature._why_off:
                feature._why_off = None
                feature._resume()


def _seed_all() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing is compiled before the test, and nothing of it stays."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def without_gradients() -> Iterator[None]:
    """As an engine serves."""
    with torch.no_grad():
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A bad index ends the process where kernels of inductor have several threads: torch's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
