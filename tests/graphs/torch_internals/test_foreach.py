"""Copies of many tensors, with and without torch's private operation."""

from __future__ import annotations

import pytest
import torch

from graphs.torch_internals.foreach import copy_all


def refuses(*_: object) -> None:
    raise NotImplementedError("not on this device")


@pytest.mark.parametrize("broken", [None, "gone", refuses, lambda: None])
def test_each_target_gets_its_source(broken, monkeypatch):
    if broken == "gone":
        monkeypatch.delattr(torch, "_foreach_copy_")
    elif broken is not None:
        monkeypatch.setattr(torch, "_foreach_copy_", broken)
    buffers = [torch.zeros(4, 6), torch.zeros(5, dtype=torch.int64)]
    sources = [torch.randn(2, 3), torch.arange(3)]
    copy_all([buffers[0][:2, :3], buffers[1][1:4]], sources)
    assert torch.equal(buffers[0][:2, :3], sources[0]) and buffers[0].count_nonzero() == 6
    assert buffers[1].tolist() == [0, 0, 1, 2, 0]
