import json

import pytest
import torch
from torch import nn

from graphs.watch.calls import describe_call
from graphs.watch.repeats import CannotRepeat, check_call, inputs_of_call, under_modes_of


def everything(x, scale, *more, flag=False, **rest):
    return x


def described(function, **values):
    return describe_call(function.__code__, "models", values)


def test_inputs_are_made_again_with_the_same_layouts_and_no_contents():
    tensors = [
        torch.full((4, 5), 7.0)[:, ::2],
        torch.tensor([3, 4]),
        torch.ones(1, 3).expand(2, 3),
        torch.ones(0, 3),
        torch.tensor(True),
    ]
    values = {"x": tensors, "scale": {"inner": (tensors[0], 2)}, "more": (), "flag": None}
    call = json.loads(json.dumps(described(everything, **values, rest={"last": tensors[1]})))
    (made, inner), keywords = inputs_of_call(check_call(call))
    assert list(keywords) == ["flag", "last"] and keywords["flag"] is None
    for one, other in zip([*tensors, tensors[0]], [*made, inner["inner"][0]], strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    assert made[0].eq(1).all() and made[1].eq(0).all() and inner["inner"][1] == 2


def test_modes_are_those_of_the_call():
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        call = described(everything, x=1)
    with torch.inference_mode():
        inference = described(everything, x=1)
    with under_modes_of(call):
        assert not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    with under_modes_of(inference):
        assert torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("text", "input 0 is a str"),
        (nn.Parameter(torch.ones(1)), "is a Parameter"),
        (torch.ones(2).to_sparse(), "sparse_coo tensor of float32"),
        ({1: 2}, "is a dict"),
        ([[[[[[[[1]]]]]]]], "too many values"),
        ([0] * 600, "too many values"),
    ],
)
def test_what_is_not_described_cannot_be_repeated(value, reason):
    with pytest.raises(CannotRepeat, match=reason):
        inputs_of_call(check_call(described(everything, x=value)))


TENSOR = {"shape": [2], "stride": [1], "dtype": "float32", "device": "cpu"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "seven"}, "no dtype 'seven'"),
        ({"device": "nowhere"}, "cannot be made here"),
        ({"shape": [1 << 50]}, "bytes, but there are"),
        ({"dtype": "int64", "requires_grad": True}, "cannot be made here"),
    ],
)
def test_tensors_that_cannot_be_made_are_named(change, reason):
    call = described(everything) | {"args": [TENSOR | change]}
    with pytest.raises(CannotRepeat, match=reason):
        inputs_of_call(check_call(call))


@pytest.mark.parametrize(
    "call",
    [
        None,
        [],
        {"function": "f"},
        {"args": {}},
        {"grad": 1},
        {"args": [3]},
        {"args": [{}]},
        {"args": [{"value": "text"}]},
        {"args": [{"value": 1.5}]},
        {"args": [{"list": 3}]},
        {"args": [TENSOR | {"shape": [-1]}]},
        {"args": [TENSOR | {"stride": [1, 2]}]},
        {"args": [TENSOR | {"dtype": 5}]},
        {"kwargs": {"x": {"tuple": [{"type": 4}]}}},
    ],
)
def test_malformed_descriptions_are_refused(call):
    if isinstance(call, dict) and "function" not in call:
        call = described(everything) | call
    with pytest.raises(ValueError) as caught:
        check_call(call)
    assert "\n" not in str(caught.value)
