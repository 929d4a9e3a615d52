import functools

import torch
from torch import nn

from graphs.torch_internals.compiled_callables import code_of_compiled


def double(x):
    return x * 2


@functools.wraps(double)
def wrapped(x):
    return double(x)


class Layer(nn.Module):
    def forward(self, x):
        return x

    def other(self, x):
        return x


def compiled(function):
    return torch.compile(function, backend="eager")


def test_the_code_behind_what_compile_returned():
    layer, itself = Layer(), Layer()
    itself.compile(backend="eager")
    assert code_of_compiled(compiled(double)) is double.__code__
    assert code_of_compiled(compiled(layer)) is Layer.forward.__code__
    assert code_of_compiled(itself) is Layer.forward.__code__
    assert code_of_compiled(compiled(layer.other)) is Layer.other.__code__


def test_others_have_none():
    for value in (double, wrapped, Layer(), Layer().forward, Layer, compiled, print, 3, None):
        assert code_of_compiled(value) is None
