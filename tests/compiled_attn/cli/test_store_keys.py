"""Every command, and `LLM`, finds the graphs that another one has stored."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from compiled_attn.ops import load
from compiled_attn.ops import paged_attention as loader
from compiled_attn.ops.cpu.build import Build
from graphs.store.values import digest_of_globals

# Prints what the key of the first graph is made of, instead of a capture.
_FIRST_FACTORS = """
import json, os, sys
import graphs.store.stored as stored

made = stored.graph_factors
def first(*args, **options):
    print(json.dumps(made(*args, **options)), flush=True)
    os._exit(0)

stored.graph_factors = first
command, model, *arguments = sys.argv[1:]
if command == "LLM":
    from compiled_attn import LLM
    LLM(model, progress=False)
else:
    from compiled_attn.cli import main
    main([command, model, *arguments])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the default backend compiles on Linux")
def test_commands_have_the_same_keys(chat_dir, tmp_path):
    out = str(tmp_path / "bundle")
    found = {}
    for name, *options in (["LLM"], ["run"], ["serve", "--port", "0"], ["bundle", "--out", out]):
        done = subprocess.run(
            [sys.executable, "-c", _FIRST_FACTORS, name, str(chat_dir), *options],
            env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},  # as commands set it themselves
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        found[name] = json.loads(done.stdout.splitlines()[-1])
    for name, factors in found.items():
        differs = {key for key in factors if factors[key] != found["LLM"][key]}
        assert not differs, name


def test_a_process_that_builds_the_kernels_has_the_keys_of_the_next_one(monkeypatch):
    ops = load()
    before = digest_of_globals(loader)
    built = replace(ops, build=Build(Path("elsewhere"), ops.isa, seconds=20.0))
    monkeypatch.setitem(loader._OPS, ops.namespace, built)
    thread = threading.Thread()
    loader._AHEAD.append(thread)
    try:
        assert digest_of_globals(loader) == before
    finally:
        loader._AHEAD.remove(thread)
