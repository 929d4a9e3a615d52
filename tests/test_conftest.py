"""The settings that all tests share."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import torch


@pytest.mark.parametrize("order", ["first", "second"])
def test_random_numbers_of_a_test_do_not_depend_on_earlier_tests(order):
    numbers = random.random(), np.random.rand(), torch.rand(3)
    expected = torch.rand(3, generator=torch.Generator().manual_seed(0))
    assert numbers[0] == random.Random(0).random()
    assert numbers[1] == np.random.RandomState(0).rand()
    assert torch.equal(numbers[2], expected)


def test_a_run_that_imports_triton_ends_without_reports_of_leaks():
    pytest.importorskip("triton")
    command = f"import triton, pytest; pytest.main(['-q', {__file__!r}, '-k', 'earlier'])"
    run = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, timeout=200
    )
    assert "2 passed" in run.stdout and "leaked" not in run.stderr
