"""Broken kernels: each is found, by the case that is about what is wrong with it."""

from __future__ import annotations

import pytest

from compiled_attn.testing.kit import CASES, Subject, check
from compiled_attn.testing.kit.run import run_case
from tests.compiled_attn.testing.kit.kernels import BUGS, WRITING_BUGS, Kernel, WritingKernel


@pytest.mark.parametrize("kernel", [Kernel(), WritingKernel()], ids=lambda k: type(k).__name__)
def test_the_kernel_without_a_bug_passes(kernel):
    report = check(kernel)
    assert report.ok, report


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_named_by_the_right_case(bug):
    assert _first_failure(Kernel(bug), BUGS[bug]) == BUGS[bug]


@pytest.mark.parametrize("bug", WRITING_BUGS)
def test_a_bug_of_a_write_is_named_by_the_right_case(bug):
    assert _first_failure(WritingKernel(bug), WRITING_BUGS[bug]) == WRITING_BUGS[bug]


def _first_failure(kernel, expected: str) -> str | None:
    """The first case that fails; later ones do not run, nor does the slow one."""
    subject = Subject.of(kernel)
    for case in CASES:
        if case.name == "long_context" != expected:
            continue
        if run_case(subject, case, may_shrink=False).status == "failed":
            return case.name
    return None
