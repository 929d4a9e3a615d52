"""Tapes of a player in Python."""

from __future__ import annotations

import pytest

from graphs import available_backends
from graphs.torch_internals.replay.replay import Tapes
from tests.graphs.torch_internals.replay.player_double import PlayerDouble


@pytest.fixture(scope="module")
def player():
    if reason := available_backends()["inductor"]:
        pytest.skip(reason)
    return PlayerDouble()


@pytest.fixture
def tapes(player):
    player.played.clear()
    player.fails = False
    return Tapes(player)
