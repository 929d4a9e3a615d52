"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def model() -> Any:
    from tests.compiled_attn.tiny import tiny_model

    return tiny_model()


@pytest.fixture
def paced() -> Iterator[tuple[Any, Any]]:
    """The executor of an engine of which the test lets each step go, and what serves it."""
    from compiled_attn import AsyncEngine  # where the extra hf is not there, other tests go on
    from tests.compiled_attn.engine.counting import SECONDS, Paced, warm_engine

    executor = Paced()
    serving = AsyncEngine(warm_engine(executor), max_waiting=2)
    yield executor, serving
    executor.steps.release(1000)
    serving.stop(drain=False, timeout=SECONDS)
