"""What a list of a store says of each artifact."""

from __future__ import annotations

import os
import time

import pytest
import torch
from torch import nn

from graphs.store import ArtifactStore
from graphs.store.stored import _model

FACTORS = {"backend": "inductor"}


@pytest.fixture
def store(tmp_path):
    (tmp_path / "graph.bin").write_bytes(b"graph")
    store = ArtifactStore(tmp_path / "store")
    store.put(FACTORS, tmp_path / "graph.bin", about={"model": "Net", "name": "step[rows=4]"})
    return store


def test_model_name_and_time_are_stored_with_an_artifact_and_are_no_part_of_its_key(store):
    (entry,) = store.entries()
    assert (entry.label.model, entry.label.name) == ("Net", "step[rows=4]")
    assert 0 <= time.time() - entry.label.made < 100
    assert store.has(FACTORS) and entry.factors == FACTORS


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.other = nn.GELU()


def test_a_model_is_told_by_its_class_and_its_parameters():
    net = nn.Linear(100, 50)
    assert _model(net) == "Linear, 5.05k parameters"
    assert _model(Wrapped(net)) == "Wrapped of Linear, 5.05k parameters"
    assert _model(nn.GELU()) == "GELU, 0 parameters"
    assert _model(torch.relu) == "relu"
    with torch.device("meta"):
        assert _model(nn.Linear(50_000, 50_000, bias=False)) == "Linear, 2.5B parameters"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        "\x00",
        '{"model": 3, "name": ["x"], "made": "now"}',
        '{"made": 1e999}',
    ],
)
def test_a_damaged_label_says_nothing_and_costs_nothing(store, text):
    (entry,) = store.entries()
    (entry.folder / "about.json").write_text(text)
    assert (entry.label.model, entry.label.name, entry.label.made) == ("", "", None)
    with store.use(FACTORS) as folder:
        assert folder is not None


def test_an_entry_of_an_older_version_has_no_label(store):
    (entry,) = store.entries()
    os.unlink(entry.folder / "about.json")
    assert (entry.label.model, entry.label.name, entry.label.made) == ("", "", None)


def test_a_label_sends_nothing_but_one_line_of_text_to_a_terminal(store):
    (entry,) = store.entries()
    text = '{"model": "\\u001b[2J\\ud800\\nNet", "name": "' + "x" * 500 + '"}'
    (entry.folder / "about.json").write_text(text)
    assert entry.label.model == "?[2J??Net" and len(entry.label.name) == 80
