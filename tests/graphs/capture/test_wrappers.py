import gc
import weakref

import torch
from torch import nn

from graphs.capture.wrappers import with_own_code


def test_the_copy_computes_the_same_under_its_own_name():
    def double(x):
        return 2 * x

    copy = with_own_code(double, "decode[tokens=8]")
    assert copy(21) == 42
    assert copy.__name__ == copy.__code__.co_name == "decode[tokens=8]"


def test_no_two_share_a_code_object():
    def function(x):
        return x

    first, second = with_own_code(function, "f"), with_own_code(function, "f")
    assert first.__code__ is not second.__code__


def test_a_compiled_copy_goes_away_with_what_it_refers_to():
    module = nn.Linear(2, 2)
    gone = weakref.ref(module)
    compiled = torch.compile(with_own_code(module, "linear"), backend="eager")
    compiled(torch.ones(1, 2))
    del module, compiled
    gc.collect()
    assert gone() is None
