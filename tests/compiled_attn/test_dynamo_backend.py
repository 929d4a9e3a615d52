"""The entry point of the Dynamo backend: cheap to import, and the same compiler behind it."""

from __future__ import annotations

import pytest
import torch

from compiled_attn.dynamo_backend import compiled_attn_ort


def test_it_compiles_as_the_backend_it_stands_for():
    pytest.importorskip("onnxruntime")
    compiled = torch.compile(lambda x: x * 3, backend=compiled_attn_ort, dynamic=False)
    assert compiled(torch.tensor([1.0, 2.0])).tolist() == [3, 6]
