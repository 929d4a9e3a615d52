import pytest
import torch
from torch import nn

from graphs import CaptureError, capture


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x):
        self.count = self.count + x
        return self.count * 2 if x.sum() > 0 else x


def test_after_a_failed_export_modules_that_set_buffers_are_captured():
    before = dict(nn.modules.module._global_buffer_registration_hooks)
    with torch.no_grad(), pytest.raises(CaptureError, match="data-dependent"):
        capture(Counting(), [torch.ones(2)], backend="aoti")
    assert nn.modules.module._global_buffer_registration_hooks == before
    module = nn.Module()
    module.register_buffer("sum", torch.zeros(2))

    def add(x):
        module.sum = module.sum + x
        return module.sum + 1

    graph = capture(add, [torch.ones(2)], backend="aot_eager")
    assert graph.run(torch.ones(2)).tolist() == [3.0, 3.0]
