"""What serves where a kernel cannot be built: the next best one, or Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NO_COMPILER = """
import logging, sys, torch
from compiled_attn import ops as native
from tests.compiled_attn.ops.native_scene import assert_right, scene
records = []
logging.getLogger("compiled_attn").addHandler(h := logging.Handler())
h.emit = lambda record: records.append(record.getMessage())
try:
    native.load(strict=True)
except native.NativeUnavailable as error:
    print("strict:", error)
ops = [native.load(), native.load()]
assert native.unavailable() == ops[0].why_not_native and ops[0] is ops[1]
step = scene([(1, 9), (3, 3)])
assert_right(torch.ops.compiled_attn.paged_attention(*step.arguments), step)
print(ops[0].isa, len(records), records[0])
"""


STEP_DOWN = """
import logging, torch
from pathlib import Path
from compiled_attn.ops import NativeUnavailable, available_isas, load, unavailable
from compiled_attn.ops import paged_attention as op
records, best, build = [], available_isas()[0], op.build
logging.getLogger("compiled_attn").addHandler(h := logging.Handler())
h.emit = lambda record: records.append(record.getMessage())
def refuse(isa, *args, **kwargs):
    if isa in ("newest", "newer"):
        raise NativeUnavailable(f"{isa} is not known")
    return build(isa, *args, **kwargs)
op.build, op.available_isas = refuse, lambda: ["newest", "newer", best]
ops = load(strict=True)
assert ops.isa == best and ops.build.isa == best and ops.why_not_native is None
assert unavailable() is None and load() is ops
assert hasattr(torch.ops.compiled_attn, "paged_attention")
print(ops.why_not_best, records == [
    f"the native kernel is built for {best}, not for newest: newest is not known"
])
try:
    load("newest")
except NativeUnavailable as error:
    print("by name:", error)
"""


def _lines_of(script: str, **environment: str) -> list[str]:
    """Runs a script in a process of its own."""
    environment["PYTHONPATH"] = str(Path(__file__).parents[4])
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.usefixtures("compiler")
def test_an_instruction_set_that_cannot_be_built_gives_way_to_the_next_best():
    down, by_name = _lines_of(STEP_DOWN, **os.environ)
    assert down == "newest is not known True" and by_name == "by name: newest is not known"


def test_without_a_compiler_python_serves_says_so_once_and_strict_refuses(tmp_path):
    strict, lenient = _lines_of(NO_COMPILER, PATH=str(tmp_path), HOME=str(tmp_path))
    assert strict.startswith("strict: expected a C++ compiler")
    for remedy in ("install g++", "CXX", "make wheel", "--kernel portable", "--backend eager"):
        assert remedy in strict
    assert lenient.startswith("reference 1 the native kernel is not used: expected a C++ compiler")
