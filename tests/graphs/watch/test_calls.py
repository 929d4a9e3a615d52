import json

import torch
from torch import nn

from graphs.watch.calls import describe_call


def everything(x, scale, *more, flag=False, **rest):
    return x


class Module(nn.Module):
    def forward(self, x, inner=None):
        return [x for _ in range(2)]


def described(function, **values):
    return describe_call(function.__code__, "models", values)


def test_a_call_is_described_by_layouts_types_and_whole_numbers():
    x = torch.ones(2, 3, dtype=torch.bfloat16).t().requires_grad_()
    values = {"x": x, "scale": 0.5, "more": (4, None), "flag": True, "rest": {"names": ["secret"]}}
    call = described(everything, **values)
    assert call["function"] == "models:everything"
    assert call["args"] == [
        {"shape": [3, 2], "stride": [1, 3], "dtype": "bfloat16", "device": "cpu"}
        | {"requires_grad": True},
        {"type": "float"},
        {"value": 4},
        {"value": None},
    ]
    assert call["kwargs"] == {"flag": {"value": True}, "names": {"list": [{"type": "str"}]}}
    assert "secret" not in json.dumps(call) and "0.5" not in json.dumps(call)


def test_a_module_is_no_input():
    call = described(Module.forward, self=Module(), x=torch.ones(1), inner=None)
    assert call["function"] == "models:Module.forward"
    assert len(call["args"]) == 2
