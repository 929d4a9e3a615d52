"""The script of a failing case runs alone and fails like the case; with the bug gone it passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from compiled_attn.testing.kit import CASES, Subject
from compiled_attn.testing.kit.command import run_command
from compiled_attn.testing.kit.run import run_case
from compiled_attn.testing.kit.script import script
from compiled_attn.testing.kit.settings import unchanged
from tests.compiled_attn.testing.kit.kernels import Kernel, WritingKernel

KERNELS = Path(__file__).with_name("kernels.py")
BROKEN = [
    ("caps after ALiBi", "softcap_alibi"),
    ("stale lengths", "replay"),
    ("stale tables", "same_buffers"),
    ("NaN of one is NaN of all", "neighbours"),
    ("clears the rest of the block", "append"),
    ("NaN in padded rows", "padding_rows"),
    ("contiguous strides", "strided"),
    ("blocks without gaps", "strided"),
    ("lse without the sink", "lse_sinks"),
    ("the first scale for all", "int8"),
    ("block ids in 16 bits", "large_ids"),
    ("weighs a key 1 % more", "weights"),
    ("a global dtype", "global_state"),
]


def _script(bug: str, name: str) -> str:
    kind = WritingKernel if name == "append" else Kernel
    subject = Subject.of(kind(bug), source=f"{KERNELS}:{kind.__name__}()")
    case = next(each for each in CASES if each.name == name)
    return script(subject, run_case(subject, case)).replace("()  # the op", f"({bug!r})  # the op")


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    return {bug: _script(bug, name) for bug, name in BROKEN}


@pytest.mark.parametrize("bug", [bug for bug, _ in BROKEN])
def test_a_script_fails_until_the_bug_is_fixed(bug, scripts, capsys):
    text = scripts[bug]
    for source, code in ((text, 1), (text.replace(f"({bug!r})  #", "()  #"), None)):
        assert _exit_code(source) == code, capsys.readouterr().out


def _exit_code(source: str, path: str = "script.py") -> int | None:
    names = {"__name__": "__main__", "__file__": path}
    try:
        with unchanged("cpu"):
            exec(compile(source, "script.py", "exec"), names)
    except SystemExit as end:
        return end.code
    return None


OWN = """
import torch
from compiled_attn.testing import Capabilities, Interface
from compiled_attn.testing.reference import paged_attention

WIDTH = 1


def step(rows):  # a name of the script's own
    return torch.arange(0, rows + WIDTH)


def expected(q, kv, where, count, dtype=torch.float64):
    keys, values = kv.unbind(1)
    return paged_attention(q, keys, values, where, count, step(len(q)), 0.25, dtype=dtype)


class Decode(Interface):
    name, rows, features = "decode", "one", frozenset()
    parameters = ("q", "kv", "where", "count")
    reference = staticmethod(expected)

    @staticmethod
    def arguments(s):
        kv = torch.stack([s.key_cache, s.value_cache], 1)
        return (s.query, kv, s.block_table, s.seq_lens), {}

    @staticmethod
    def results(returned, args):
        return returned if isinstance(returned, tuple) else (returned, None)


def op(q, kv, where, count):
    return BUG * expected(q, kv, where, count)[0].to(q.dtype)


BUG = 1.5
op.capabilities = Capabilities(groups=(1,), block_sizes=(4,))
"""


def test_a_script_of_an_own_interface_may_have_names_of_the_script(tmp_path, monkeypatch, capsys):
    """And it finds the op from its own folder, wherever both are moved."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "old" / "cases").mkdir(parents=True)
    (tmp_path / "old" / "my-kernel.py").write_text(OWN)
    name, case = str(tmp_path / "old" / "my-kernel.py"), tmp_path / "old" / "cases" / "case.py"
    arguments = [f"{name}:op", "--interface", f"{name}:Decode", "-k", "decode"]
    assert run_command([*arguments, "--script", str(case)]) == 1
    assert str(tmp_path) not in case.read_text()
    (tmp_path / "old").rename(tmp_path / "new")
    moved = tmp_path / "new" / "cases" / "case.py"
    for bug, code in (("1.5", 1), ("1", None)):
        (tmp_path / "new" / "my-kernel.py").write_text(OWN.replace("BUG = 1.5", f"BUG = {bug}"))
        monkeypatch.delitem(sys.modules, "my-kernel")
        assert _exit_code(moved.read_text(), str(moved)) == code, capsys.readouterr().out


def test_a_script_needs_only_torch_and_the_op(tmp_path):
    path = tmp_path / "plain_kernel.py"
    path.write_text(
        "import torch\n"
        "def op(query, key_cache, value_cache, block_table, seq_lens, query_start_loc, scale):\n"
        "    return value_cache[block_table[:, 0].long(), 0]\n"
    )
    case = tmp_path / "case.py"
    sizes = ["--head-dims", "8", "--block-sizes", "4", "--groups", "1"]
    assert run_command([f"{path}:op", *sizes, "-k", "decode", "--script", str(case)]) == 1
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    call = [sys.executable, "-I", str(case)]
    done = subprocess.run(call, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 1 and "out[" in done.stdout, done
    assert not [line for line in case.read_text().splitlines() if "import" in line and
                line.startswith(("from compiled", "import compiled"))]  # fmt: skip
