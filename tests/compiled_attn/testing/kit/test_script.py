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


def _exit_code(source: str) -> int | None:
    try:
        exec(compile(source, "script.py", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        return end.code
    return None


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
