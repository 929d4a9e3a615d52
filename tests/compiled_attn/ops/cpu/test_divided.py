"""Kernels of 8-bit caches are a library of their own, built when a cache needs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compiled_attn.engine import EngineConfig, kernel
from compiled_attn.engine.kernel import chosen_kernel
from compiled_attn.errors import ConfigError, NativeUnavailable
from compiled_attn.models import default_model
from compiled_attn.ops import load
from compiled_attn.ops import paged_attention as loader

CALL = """
import sys, torch
from compiled_attn.ops import load, reference
from compiled_attn.ops import paged_attention as loader

built, build = [], loader.build_8bit

def counted(*args):
    if sys.argv[1] == "fails":
        raise loader.NativeUnavailable("the compiler is gone")
    built.append(args)
    return build(*args)

loader.build_8bit = counted
load(cache_dtype=torch.int8 if sys.argv[1] == "ahead" else torch.float32)
assert len(built) == (sys.argv[1] == "ahead")
keys, values = torch.randint(-100, 100, (2, 3, 16, 2, 64), dtype=torch.int8)
scales = torch.rand(2, 3, 16, 2) * 0.01
step = [torch.tensor(each, dtype=torch.int32) for each in ([[2, 1]], [20], [0, 1])]
call = [torch.randn(1, 4, 64), keys, values, *step, 0.125]
named = {"key_scale": scales[0], "value_scale": scales[1]}
for _ in range(2):
    out, _ = torch.ops.compiled_attn.paged_attention(*call, **named)
assert len(built) == 1
torch.testing.assert_close(out, reference.paged_attention(*call, **named)[0], rtol=2e-2, atol=2e-2)
"""


def _process(how: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CALL, how]
    return subprocess.run(command, cwd=Path(__file__).parents[4], capture_output=True, text=True)


@pytest.mark.parametrize("how", ["ahead", "at the call"])
def test_they_are_built_ahead_or_at_the_first_call(how):
    ran = _process(how)
    assert ran.returncode == 0, ran.stderr


def test_a_call_without_them_fails_with_the_reason():
    ran = _process("fails")
    assert "there are no kernels of 8-bit caches: the compiler is gone" in ran.stderr
    assert "RuntimeError: paged_attention: expected the kernels of 8-bit caches" in ran.stderr


def test_an_engine_builds_them_before_its_warmup(monkeypatch):
    seen = []

    def loaded(**options):
        seen.append(options)
        if options.get("cache_dtype") is torch.int8:
            raise NativeUnavailable("no compiler")
        return load()

    monkeypatch.setattr(kernel, "load", loaded)
    model = default_model(0, torch.bfloat16)
    assert chosen_kernel(model, EngineConfig()).name == "native"
    with pytest.raises(ConfigError, match="cannot be built here: no compiler"):
        chosen_kernel(model, EngineConfig(kv_dtype="int8"))
    assert [each.get("cache_dtype") for each in seen] == [torch.bfloat16, torch.int8, None]


def test_a_start_builds_them_next_to_the_others(monkeypatch):
    built = []
    for name in ("_OPS", "_AHEAD"):
        monkeypatch.setattr(loader, name, type(getattr(loader, name))())
    monkeypatch.setattr(loader, "prebuilt", lambda isa: None)
    for name in ("_build_divided", "_build_8bit"):
        monkeypatch.setattr(loader, name, lambda isa, name=name: built.append(name))
    loader.build_ahead(torch.float8_e4m3fn)
    for thread in loader._AHEAD:
        thread.join()
    assert sorted(built) == ["_build_8bit", "_build_divided"]
