"""`pytest --paged-attention module:op`: each case is a test."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]


@pytest.fixture
def run(pytester, monkeypatch):
    """Runs pytest on an op of a module, in this process."""
    monkeypatch.syspath_prepend(str(pytester.path))
    pytester.makepyfile(
        mykernels="from tests.compiled_attn.testing.kit.kernels import Kernel\n"
        "right, broken = Kernel(), Kernel('window off by one')\n"
    )

    def run_on(op: str, *options: str):
        plugin = ("-p", "compiled_attn.pytest_plugin", "-p", "no:cacheprovider")
        return pytester.runpytest(*plugin, f"--paged-attention={op}", *options)

    return run_on


def test_a_broken_kernel_fails_one_test_with_a_script(run):
    result = run("mykernels:broken", "-k", "window or decode or rotary")
    result.assert_outcomes(failed=1, passed=1, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "window: a kernel must guarantee that*",
            "op = importlib.import_module('mykernels').broken  # *",
        ]
    )


def test_bad_input_is_a_usage_error(run):
    result = run("mykernels:nothing")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--paged-attention mykernels:nothing: mykernels has no nothing*"])
    result = run("mykernels:right", "--paged-attention-interface=flsh")
    result.stderr.fnmatch_lines(["*interface: expected one of flash*"])
