"""The shared checks: nothing where it fits, else expected, got, remedy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compiled_attn.arguments import Expect, is_number, slot_used_twice

EXPECT = Expect(ValueError, TypeError, "op: ", "match the query")
ROWS = torch.zeros(3, 4)

REFUSED = {
    "no tensor": (([1], "[T, D]", (3, 4)), TypeError, r"op: x: expected a tensor \[T, D\], got l"),
    "another rank": (
        (ROWS[0], "[T, D]", (None, 4)),
        ValueError,
        r"op: expected x \[T, D\] of shape \[any, 4\], got \[4\]: match the query",
    ),
    "another size": ((ROWS, "", (3, 5)), ValueError, r"expected x of shape \[3, 5\], got \[3, 4\]"),
    "another dtype": (
        (ROWS, "", (3, 4), (torch.int32, torch.int64)),
        TypeError,
        r"expected x of dtype int32 or int64, got float32: convert it with \.to\(\)",
    ),
    "another device": (
        (ROWS.to("meta"), "", (3, 4), None, ROWS),
        ValueError,
        r"expected x on cpu, got meta: move it with \.to\(\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_tensor_that_does_not_fit_is_refused(name):
    arguments, error, match = REFUSED[name]
    with pytest.raises(error, match=match):
        EXPECT.tensor("x", *arguments)


def test_a_tensor_that_fits_passes():
    EXPECT.tensor("x", ROWS, "[T, D]", (None, 4), (torch.float32,), ROWS)
    EXPECT.unit_stride(x=ROWS, column=ROWS.T[:, :1])
    EXPECT.contiguous(x=ROWS)
    EXPECT.not_expanded(ROWS, ROWS[:1].expand(1, 4))
    EXPECT.heads(6, 3)
    EXPECT(True, "anything", None, "nothing")


@pytest.mark.parametrize(
    ("check", "match"),
    [
        (lambda: EXPECT.unit_stride(x=ROWS.T), r"x of stride\(-1\) == 1, got \(1, 4\)"),
        (lambda: EXPECT.contiguous(x=ROWS.T), r"contiguous x, got \(1, 4\)"),
        (lambda: EXPECT.not_expanded(ROWS[:1].expand(3, 4)), "caches without expanded axes"),
        (lambda: EXPECT.heads(4, 3), r"H divisible by Hk, got \(4, 3\)"),
        (lambda: EXPECT.heads(4, 0), r"H divisible by Hk, got \(4, 0\)"),
        (lambda: EXPECT(False, "a row", ROWS.shape, "add one"), r"a row, got \[3, 4\]: add one"),
    ],
)
def test_what_does_not_hold_is_refused(check, match):
    with pytest.raises(ValueError, match=f"op: expected {match}"):
        check()


def test_a_slot_that_is_used_twice_is_found():
    assert slot_used_twice(torch.tensor([4, 1, 9, 1])) == 1
    assert slot_used_twice(torch.tensor([4, 1, 9])) is None
    assert slot_used_twice(torch.tensor([], dtype=torch.int64)) is None


def test_tensors_and_texts_are_no_numbers():
    assert is_number(1) and is_number(0.5)
    assert is_number(np.float32(0.5)) and is_number(np.int64(3))
    assert not is_number("1") and not is_number(torch.tensor(1.0)) and not is_number(None)
    EXPECT.number("scale", 0.5)
    with pytest.raises(TypeError, match="op: scale: expected a number, got NoneType: pass a float"):
        EXPECT.number("scale", None)
