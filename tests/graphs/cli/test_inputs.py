from types import ModuleType

import pytest
import torch

from graphs import Bucket
from graphs.cli.errors import UserError
from graphs.cli.inputs import inputs_of, make_inputs_of, parse_bucket, parse_input
from graphs.cli.target import Target


@pytest.mark.parametrize(
    ("text", "shape", "dtype", "value"),
    [
        ("2x8:int64", (2, 8), torch.int64, 0),
        ("3", (3,), torch.float32, 1),
        (":bfloat16", (), torch.bfloat16, 1),
        ("1x1:bool", (1, 1), torch.bool, 0),
        ("0x4:float64", (0, 4), torch.float64, None),
    ],
)
def test_a_tensor_has_its_shape_and_dtype(text, shape, dtype, value):
    made = parse_input(text)
    assert (tuple(made.shape), made.dtype) == (shape, dtype)
    assert value is None or (made == value).all()


@pytest.mark.parametrize(
    ("text", "value"),
    [("=3", 3), ("=-0.5", -0.5), ("=true", True), ("=None", None), ("=mean", "mean"), ("=", "")],
)
def test_a_constant_has_its_kind(text, value):
    assert parse_input(text) == value and type(parse_input(text)) is type(value)


@pytest.mark.parametrize("text", ["", "2x:int64", "2x-1", "x", "2*3", "2:float33", "2:Tensor", "٣"])
def test_what_is_no_input_is_refused(text):
    with pytest.raises(UserError, match="expected SHAPE:DTYPE"):
        parse_input(text)


def test_a_bucket_is_read_by_names():
    assert parse_bucket("rows=4,length=16") == parse_bucket("rows=4 length=16")
    assert parse_bucket("rows=4,length=16") == Bucket(rows=4, length=16)
    for bad in ("", "rows", "rows=-1", "rows=a", "4=4"):
        with pytest.raises(UserError, match="expected sizes by name"):
            parse_bucket(bad)


def target_with(**functions):
    module = ModuleType("mine")
    vars(module).update(functions)
    return Target("mine:f", len, module)


def test_inputs_come_from_a_function_with_or_without_a_bucket():
    target = target_with(plain=lambda: torch.ones(2), sized=lambda bucket: (bucket.rows, None))
    (made,) = inputs_of(target, "plain", None)
    assert made.shape == (2,)
    assert inputs_of(target, "sized", Bucket(rows=3)) == (3, None)
    assert make_inputs_of(target, "sized")(Bucket(rows=4)) == (4, None)
    with pytest.raises(UserError, match="sized takes a bucket: say which"):
        inputs_of(target, "sized", None)


def test_a_function_that_is_missing_or_fails_or_returns_something_else_is_an_error():
    target = target_with(bad=lambda bucket: 1 / 0, odd=lambda bucket: {"x": 1})
    with pytest.raises(UserError, match="mine has no function example_inputs"):
        make_inputs_of(target, "example_inputs")
    with pytest.raises(
        UserError, match=r"bad\(rows=2\) failed: ZeroDivisionError.*test_inputs.py:"
    ):
        make_inputs_of(target, "bad")(Bucket(rows=2))
    with pytest.raises(UserError, match="odd returned a dict; expected a tuple"):
        inputs_of(target, "odd", Bucket(rows=2))
