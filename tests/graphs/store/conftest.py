"""Fixtures that the tests of the store share."""

import sys

import pytest

SOURCE = """
import torch
from torch import nn
{lazy}
FACTOR = 3

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = 0.5
        self.table = {{"a": [1, 2]}}

    def forward(self, x):
        from my_store_helper import helper
        return helper(self.linear(x)) * self.scale * FACTOR
"""


@pytest.fixture
def artifact(tmp_path):
    folder = tmp_path / "built"
    (folder / "deep").mkdir(parents=True)
    (folder / "graph.bin").write_bytes(bytes(range(256)) * 40)
    (folder / "deep" / "notes.json").write_text("{}")
    return folder


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Imports the module again from its files, as a new process would."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_store_net.py").write_text(SOURCE.format(lazy=""))
    (tmp_path / "my_store_helper.py").write_text("def helper(x):\n    return x + 1\n")

    def load(name="", text=""):
        if name:
            path = tmp_path / f"{name}.py"
            path.write_text(path.read_text() + text)
        for module in ("my_store_net", "my_store_helper"):
            sys.modules.pop(module, None)
        import my_store_helper  # noqa: F401
        import my_store_net

        return my_store_net.Net()

    yield load
    for module in ("my_store_net", "my_store_helper"):
        sys.modules.pop(module, None)
