"""A callable of several kernels, and a comparison of its graph with eager."""

from __future__ import annotations

import torch
from torch import nn


@torch.compiler.nested_compile_region
def layer(x, scale):
    """Has kernels of its own, which are called again for each layer."""
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * scale
    return torch.softmax(y, -1).flip(0) - x.amax(0, keepdim=True)


class Step(nn.Module):
    """Several kernels with memory between them, a parameter, and a cache that is written."""

    def __init__(self, size=48):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(size))
        self.register_buffer("cache", torch.zeros(8, size))

    def forward(self, x, rows):
        for _ in range(3):
            x = layer(x, self.scale)
        self.cache.index_copy_(0, rows, x[: len(rows)])
        return x, self.cache[rows].sum(-1)


def inputs_of(tokens, size=48):
    return torch.randn(tokens, size), torch.randperm(8)[: min(tokens, 8)]


def assert_like_eager(module, graph, inputs):
    module.cache.normal_()
    own = module.cache.clone()
    expected = module(*inputs)
    written = module.cache.clone()
    module.cache.copy_(own)
    made = graph.run(*inputs)
    torch.testing.assert_close(made, expected)
    torch.testing.assert_close(module.cache, written)
