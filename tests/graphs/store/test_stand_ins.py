"""Modules that stand in for inductor's code generator while a graph is read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from graphs.store.stand_ins import standing_in

ROOT = Path(__file__).resolve().parents[3]
NAME = "torch._inductor.select_algorithm"


def told(program: str) -> str:
    """What a program says in a process of its own, which has imported torch alone."""
    start = "import sys, torch\nfrom graphs.store.stand_ins import standing_in\n"
    command = [sys.executable, "-c", start + program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_torchs_own_functions_need_no_generator_and_are_those_that_it_has():
    program = f"""
with standing_in(b""):
    from {NAME} import extern_kernels
    from torch._inductor.codegen.memory_planning import _align
    from torch._inductor.decomposition import select_decomp_table
names = "mm", "addmm", "bmm", "baddbmm"
before = [getattr(extern_kernels, name) for name in names]
print("{NAME}" in sys.modules, _align(65))
import {NAME} as real
print(before == [getattr(real.extern_kernels, name) for name in names])
from torch._inductor.codegen import memory_planning
print(memory_planning._align(65), len(select_decomp_table()) > 100)
"""
    assert told(program).split() == ["False", "128", "True", "128", "True"]


def test_what_a_stand_in_lacks_comes_from_the_real_module():
    program = f"""
with standing_in(b""):
    import torch._inductor.select_algorithm as module
    from {NAME} import extern_kernels
    print(module.ExternKernelChoice.__module__)
print(extern_kernels.bias_addmm is sys.modules["{NAME}"].extern_kernels.bias_addmm)
print(torch._inductor.debug.RECORD_GRAPH_EXECUTION, torch._inductor.debug.DebugContext.__name__)
"""
    assert told(program).split() == [NAME, "True", "False", "DebugContext"]


def test_another_thread_meanwhile_gets_the_real_module_and_waits_for_nobody():
    program = f"""
import threading
def compile():
    from torch._inductor.graph import GraphLowering
    import {NAME} as module
    print(type(GraphLowering).__name__, module.extern_kernels.__class__.__module__)
with standing_in(b""):
    other = threading.Thread(target=compile, daemon=True)
    other.start()
    other.join(60)
    print(other.is_alive())
"""
    assert told(program).split() == ["type", NAME, "False"]


def test_a_graph_with_an_op_of_the_generator_gets_none():
    program = f"""
with standing_in(b"torch.ops.made_by.nobody(buf0)"):
    print("{NAME}" in sys.modules)
"""
    assert told(program).split() == ["False"]


@pytest.mark.parametrize("graph", [b"", b"torch.ops.aten.mm.default(x)"])
def test_what_is_imported_stays(graph):
    import torch._inductor.select_algorithm as real

    with standing_in(graph):
        assert sys.modules[NAME] is real
    assert sys.modules[NAME] is real and torch.ops.aten.mm
