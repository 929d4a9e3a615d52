"""Kernels of 8-bit and 16-bit caches are libraries of their own, built when a cache needs them."""

from __future__ import annotations

import json
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

CASES = """
import json, os, sys, tempfile, traceback
import torch
from compiled_attn.ops import load, reference
from compiled_attn.ops.cpu import parts

build = parts.build_part

def call(how, dtype):
    built = []

    def counted(*args):
        if how == "fails":
            raise parts.NativeUnavailable("the compiler is gone")
        built.append(args)
        return build(*args)

    parts.build_part = counted
    load(cache_dtype=dtype if how == "ahead" else torch.float32)
    assert len(built) == (how == "ahead")
    step = [torch.tensor(each, dtype=torch.int32) for each in ([[2, 1]], [20], [0, 1])]
    query, (keys, values), named = torch.randn(1, 4, 64), torch.randn(2, 3, 16, 2, 64), {}
    if dtype is torch.int8:
        keys, values = ((each * 30).to(dtype) for each in (keys, values))
        named = {"key_scale": torch.rand(3, 16, 2) / 30, "value_scale": torch.rand(3, 16, 2) / 30}
    else:
        query, keys, values = (each.to(dtype) for each in (query, keys, values))
    arguments = query, keys, values, *step, 0.125
    for _ in range(2):
        out, _ = torch.ops.compiled_attn.paged_attention(*arguments, **named)
    assert len(built) == 1
    expected = reference.paged_attention(*arguments, **named)[0]
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)

def forked(how, dtype):
    with tempfile.TemporaryFile("w+") as errors:
        if not (child := os.fork()):
            status = 1
            try:
                os.dup2(errors.fileno(), 2)
                call(how, getattr(torch, dtype))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        errors.seek(0)
        return status, errors.read()

print(json.dumps([forked(*case) for case in json.loads(sys.argv[1])]))
"""
DTYPES = ["int8", "bfloat16", "float16"]
HOW = ["ahead", "at the call"]
FAILS = [("int8", 8), ("bfloat16", 16)]


@pytest.fixture(scope="module")
def ran() -> dict[tuple[str, str], tuple[int, str]]:
    """Status and errors of each case, in a fork of one process that has loaded no library yet."""
    cases = [(how, dtype) for how in HOW for dtype in DTYPES]
    cases += [("fails", dtype) for dtype, _ in FAILS]
    command = [sys.executable, "-c", CASES, json.dumps(cases)]
    root = Path(__file__).parents[4]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(zip(cases, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", HOW)
def test_they_are_built_ahead_or_at_the_first_call(how, dtype, ran):
    status, errors = ran[how, dtype]
    assert status == 0, errors


@pytest.mark.parametrize("dtype, bits", FAILS)
def test_a_call_without_them_fails_with_the_reason(dtype, bits, ran):
    status, errors = ran["fails", dtype]
    assert f"there are no kernels of {bits}-bit caches: the compiler is gone" in errors
    assert f"RuntimeError: paged_attention: expected the kernels of {bits}-bit" in errors
    assert status


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
    assert [each.get("cache_dtype") for each in seen] == [None, torch.bfloat16, None, torch.int8]


@pytest.mark.parametrize(
    "dtype, bits", [(torch.float8_e4m3fn, 8), (torch.bfloat16, 16), (torch.float32, None)]
)
def test_a_start_builds_them_next_to_the_others(dtype, bits, monkeypatch):
    built = []
    for name in ("_OPS", "_AHEAD"):
        monkeypatch.setattr(loader, name, type(getattr(loader, name))())
    monkeypatch.setattr(loader, "prebuilt", lambda isa: None)
    monkeypatch.setattr(loader, "build", lambda *_, divided: built.append(None))
    monkeypatch.setattr(loader, "build_part", lambda bits, *_: built.append(bits))
    loader.build_ahead(dtype)
    for thread in loader._AHEAD:
        thread.join()
    assert {*built} == {None, bits}
