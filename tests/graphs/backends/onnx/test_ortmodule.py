from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from graphs import CaptureError, capture
from graphs.backends.onnx.ortmodule import OrtModuleBackend

BACKEND = OrtModuleBackend()


@pytest.fixture
def stub(monkeypatch):
    """A torch_ort whose ORTModule counts its runs."""
    module = ModuleType("torch_ort")

    class ORTModule(nn.Module):
        runs = 0

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *inputs):
            ORTModule.runs += 1
            return self.inner(*inputs)

    module.ORTModule = ORTModule
    monkeypatch.setitem(sys.modules, "torch_ort", module)
    return ORTModule


def test_without_torch_ort_the_reason_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_ort", None)
    assert BACKEND.available() == "torch-ort is not installed; use backend 'onnxrt'"


def test_a_torch_ort_that_does_not_import_gives_its_error(monkeypatch, tmp_path):
    (tmp_path / "torch_ort.py").write_text("from torch.onnx import _no_such_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch_ort", raising=False)
    reason = BACKEND.available()
    assert f"does not import with torch {torch.__version__}" in reason
    assert "_no_such_name" in reason and "use backend 'onnxrt'" in reason
    with pytest.raises(CaptureError, match="_no_such_name"):
        capture(torch.relu, [torch.ones(2)], backend=BACKEND)


def test_it_runs_modules_and_functions_through_ortmodule(stub):
    assert BACKEND.available() is None
    for function in (nn.ReLU(), torch.relu):
        graph = capture(function, [torch.ones(2)], backend=BACKEND, warm_runs=2)
        before = stub.runs
        assert graph.run(torch.tensor([-1.0, 1.0])).tolist() == [0, 1]
        assert stub.runs == before + 1 >= 3


class Adds(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(2))

    def forward(self, x):
        self.total.add_(x)
        return self.total * 2


def test_what_changes_in_place_is_refused(stub):
    with pytest.raises(CaptureError, match=r"changes total in place.*'onnxrt'"):
        capture(Adds(), [torch.ones(2)], backend=BACKEND)
    with pytest.raises(CaptureError, match="changes input 0 in place"):
        capture(lambda x: x.add_(1), [torch.ones(2)], backend=BACKEND)
    assert stub.runs == 0
