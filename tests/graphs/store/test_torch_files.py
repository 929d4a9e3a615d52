"""The state of torch's sources, by which a start knows that inductor's digest of them holds."""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._inductor import codecache
from torch.utils._appending_byte_serializer import BytesWriter

from graphs.store import torch_files

ROOT = Path(__file__).resolve().parents[3]


def test_every_file_that_inductor_reads_is_looked_at():
    folder = Path(torch.__file__).parent
    seen = {each.path for each in torch_files._sources(str(folder))}
    found = pkgutil.walk_packages([str(folder / "_inductor")], "torch._inductor.")
    read = {each.module_finder.find_spec(each.name, None).origin for each in found}
    read |= {str(path) for path in folder.glob("_C.*")}
    assert len(read) > 100 and not read - seen


def test_another_size_or_time_is_another_state(monkeypatch, tmp_path):
    (tmp_path / "part").mkdir()
    for name in ("__init__.py", "part/__init__.py", "part/code.py"):
        (tmp_path / name).write_text("pass")
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    state = torch_files.state_of_torch.__wrapped__
    first = state()
    assert state() == first
    os.utime(tmp_path / "part/code.py", ns=(1, 1))
    second = state()
    (tmp_path / "part/more.py").write_text("")
    assert len({first, second, state()}) == 3


def test_the_key_of_a_graph_is_that_which_inductor_computes():
    program = """
import torch
from torch._inductor.codecache import torch_key
from torch.utils._appending_byte_serializer import BytesWriter
from graphs.store.torch_files import take_key
graph = BytesWriter()
graph.write_bytes(b"kind")
graph.write_bytes(b"a key")
take_key(graph.to_bytes())
print(torch_key())
take_key(graph.to_bytes())  # it is known
"""
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.strip() == "b'a key'"


@pytest.mark.parametrize("refusal", [RuntimeError, AssertionError], ids=["2.13", "2.11"])
def test_a_key_that_torch_knows_already_is_no_error(monkeypatch, refusal):
    def refuse(_):
        raise refusal

    content = BytesWriter()
    content.write_bytes(b"kind")
    content.write_bytes(b"a key")
    monkeypatch.setattr(codecache, "torch_key", SimpleNamespace(set=refuse))
    torch_files.take_key(content.to_bytes())
