import functools

import pytest
import torch
from torch import nn

from graphs.capture import inputs as module
from graphs.capture.inputs import InputsCheck, parameter_names
from graphs.torch_internals.checks import NATIVE_CHECKS


def callee(x, slot_mapping, bias=None, width=4):
    return x


EXAMPLES = [torch.zeros(2, 3), torch.zeros(4, dtype=torch.int64), None, 4]
FITTING = [torch.ones(2, 3), torch.ones(4, dtype=torch.int64), None, 4]


@pytest.fixture(params=["native", "python"])
def check(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(module, "_native_check", lambda examples: None)
    return InputsCheck(callee, EXAMPLES)


def test_inputs_like_the_examples_fit(check):
    assert check.mismatch(FITTING) is None
    assert check.mismatch(EXAMPLES) is None


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [
        (0, torch.zeros(3, 3), "tensor 'x' has shape (3, 3), captured (2, 3)"),
        (0, torch.zeros(2, 3, 1), "tensor 'x' has shape (2, 3, 1), captured (2, 3)"),
        (0, torch.zeros(3, 2).t(), "tensor 'x' has stride (1, 2), captured (3, 1)"),
        (0, torch.zeros(2, 3, device="meta"), "tensor 'x' has device meta, captured cpu"),
        (0, None, "tensor 'x' is a NoneType, captured a tensor"),
        (
            1,
            torch.zeros(4, dtype=torch.int32),
            "tensor 'slot_mapping' has dtype int32, captured int64",
        ),
        (2, torch.zeros(1), "constant 'bias' is a tensor, captured None"),
        (3, 5, "constant 'width' is 5, captured 4"),
        (3, 4.0, "constant 'width' is 4.0, captured 4"),
        (3, True, "constant 'width' is True, captured 4"),
    ],
)
def test_an_input_that_differs_is_named_with_both_values(check, place, value, text):
    changed = [*FITTING]
    changed[place] = value
    assert check.mismatch(changed) == text


def test_a_wrong_number_of_inputs_lists_the_captured_ones(check):
    expected = "3 inputs, captured 4 (x, slot_mapping, bias, width)"
    assert check.mismatch(FITTING[:3]) == expected
    assert check.mismatch([*FITTING, 1]).startswith("5 inputs, captured 4")


def test_equal_constants_of_another_type_do_not_pass_for_each_other(check):
    one = InputsCheck(callee, [torch.zeros(1), torch.zeros(1), None, 1])
    assert one.mismatch([torch.zeros(1), torch.zeros(1), None, True]) is not None


def test_what_the_layout_does_not_show_is_left_to_the_backend(check):
    changed = [torch.zeros(2, 3, requires_grad=True), *FITTING[1:]]
    assert check.mismatch(changed) is None
    assert check.mismatch([nn.Parameter(torch.zeros(2, 3)), *FITTING[1:]]) is None


def test_parameters_and_repeated_tensors_may_be_examples():
    same = nn.Parameter(torch.zeros(2))
    check = InputsCheck(callee, [same, same])
    assert check.mismatch([same, same]) is None
    assert check.mismatch([torch.zeros(2), torch.zeros(2)]) is None
    assert check.mismatch([same, torch.zeros(3)]) is not None
    assert NATIVE_CHECKS.is_on  # a tensor that is given twice says nothing of torch


def test_the_specs_say_what_was_captured(check):
    x, slots, bias, width = check.specs
    assert (x.name, x.shape, x.dtype, x.stride) == ("x", (2, 3), torch.float32, (3, 1))
    assert (slots.name, slots.device) == ("slot_mapping", torch.device("cpu"))
    assert (bias.shape, bias.constant) == (None, None)
    assert (width.name, width.constant) == ("width", 4)


@pytest.mark.parametrize("value", [[torch.zeros(1)], {"a": 1}, object()])
def test_an_input_that_is_neither_tensor_nor_constant_is_a_type_error(value):
    with pytest.raises(TypeError, match=r"input 'x' is a .*; expected a tensor"):
        InputsCheck(callee, [value])


class Module(nn.Module):
    def forward(self, query, *rest):
        return query


def test_parameters_are_named_after_the_callable():
    assert parameter_names(callee, 2) == ["x", "slot_mapping"]
    assert parameter_names(Module(), 3) == ["query", "rest[0]", "rest[1]"]
    assert parameter_names(functools.partial(callee, None), 1) == ["slot_mapping"]
    assert parameter_names(lambda a, *, b: a, 2) == ["a", "input 1"]
    assert parameter_names(torch.add, 2) == ["input 0", "input 1"]
