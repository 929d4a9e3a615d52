"""Fixtures: a replayer in Python, and replays that use it."""

from __future__ import annotations

import pytest

from graphs import available_backends
from graphs.torch_internals.replay.replay import Replays
from tests.graphs.torch_internals.replay.replayer_double import ReplayerDouble


@pytest.fixture(scope="module")
def replayer():
    if reason := available_backends()["inductor"]:
        pytest.skip(reason)
    return ReplayerDouble()


@pytest.fixture
def replays(replayer):
    replayer.replayed.clear()
    replayer.fails = False
    return Replays(replayer)
