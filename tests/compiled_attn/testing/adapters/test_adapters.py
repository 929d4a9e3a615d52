"""All adapters can be imported anywhere; without their package they fail in one line."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import pytest
import torch

from compiled_attn.testing import Capabilities, adapters
from compiled_attn.testing.adapters import AdapterUnavailable

from .work import step

NAMES = [each.name for each in pkgutil.iter_modules(adapters.__path__)]


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_declares_what_it_claims(name):
    module = importlib.import_module(f"compiled_attn.testing.adapters.{name}")
    assert isinstance(module.CAPABILITIES, Capabilities)


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
