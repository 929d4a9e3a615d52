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

# Prints what the key of the first graph is made of, instead of a capture, for each command. The
# commands are forks of a process that has imported packages of others only.
_FIRST_FACTORS = """
import json, os, sys, traceback
import torch, torch._inductor.compile_fx, transformers.models.llama.modeling_llama

def start(command, *arguments):
    import graphs.store.stored as stored
    made = stored.graph_factors
    def first(*args, **options):
        print(json.dumps([command, made(*args, **options)]), flush=True)
        os._exit(0)

    stored.graph_factors = first
    if command == "LLM":
        from compiled_attn import LLM
        LLM(*arguments, progress=False)
    else:
        from compiled_attn.cli import main
        main([command, *arguments])

for command in json.loads(sys.argv[1]):
    if not (child := os.fork()):
        try:
            start(*command)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0, command
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the default backend compiles on Linux")
def test_commands_have_the_same_keys(chat_dir, tmp_path):
    out, model = str(tmp_path / "bundle"), str(chat_dir)
    commands = [["LLM", model], ["run", model], ["serve", model, "--port", "0"]]
    commands.append(["bundle", model, "--out", out])
    done = subprocess.run(
        [sys.executable, "-c", _FIRST_FACTORS, json.dumps(commands)],
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},  # as commands set it themselves
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))
    assert [*found] == ["LLM", "run", "serve", "bundle"]
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
