"""All adapters can be imported anywhere; without their package they fail in one line."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import pytest
import torch

from compiled_attn.testing import adapters
from compiled_attn.testing.adapters import AdapterUnavailable
from compiled_attn.testing.kit.subject import Subject
from tests.compiled_attn.testing.adapters.work import step

NAMES = [each.name for each in pkgutil.iter_modules(adapters.__path__)]
OPS = (
    "flash_attn_with_kvcache",
    "compiled",
    "paged_attention",
    "paged_attention_v1",
    "varlen_attn",
)


@pytest.mark.parametrize("name", NAMES)
def test_the_interface_of_an_adapter_can_express_what_it_claims(name):
    module = importlib.import_module(f"compiled_attn.testing.adapters.{name}")
    ops = [getattr(module, each) for each in OPS if hasattr(module, each)]
    assert ops
    for op in ops:
        assert Subject.of(op, changes={"device": "cpu"}).claims.features


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("vllm_cpu", "vllm._custom_ops"),
        ("openvino", "openvino"),
        ("transformers_eager", "transformers.integrations.eager_paged"),
    ],
)
def test_an_absent_package_is_one_line(monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    module = importlib.import_module(f"compiled_attn.testing.adapters.{name}")
    with pytest.raises(AdapterUnavailable, match=rf"^expected a module {package}[^\n]*$"):
        module.paged_attention(**step())


def test_flash_attention_without_its_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    from compiled_attn.testing.adapters.flash_attn import flash_attn_with_kvcache

    with pytest.raises(AdapterUnavailable, match=r"^expected a module flash_attn,[^\n]*$"):
        flash_attn_with_kvcache(*(torch.zeros(1, 1, 1, 16),) * 3)
