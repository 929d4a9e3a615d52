"""Fixtures that the tests of the store share."""

import pytest


@pytest.fixture
def artifact(tmp_path):
    folder = tmp_path / "built"
    (folder / "deep").mkdir(parents=True)
    (folder / "graph.bin").write_bytes(bytes(range(256)) * 40)
    (folder / "deep" / "notes.json").write_text("{}")
    return folder
