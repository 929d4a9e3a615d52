"""A module with a cache, and a manager of it: what the tests of warming up and serving share."""

import torch
from torch import nn

from graphs import WarmupManager, explicit

SPACE = explicit(["tokens"], [2, 4, 8])


class Cache(nn.Module):
    """Adds its input into a buffer, and returns a multiple of it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("sum", torch.zeros(8))
        self.factor = 3

    def forward(self, x, slot_mapping):
        self.sum.index_add_(0, slot_mapping, x)
        return x * self.factor


def inputs_of(bucket):
    return [torch.ones(bucket.tokens), torch.zeros(bucket.tokens, dtype=torch.int64)]


def make_manager(space=SPACE, module=None, make_inputs=inputs_of, **options):
    options = {"backend": "eager", "name": "decode", **options}
    return WarmupManager(module or Cache(), space, make_inputs, **options)


def failing_at(*tokens):
    def make_inputs(bucket):
        if bucket.tokens in tokens:
            raise RuntimeError(f"no inputs for {bucket}")
        return inputs_of(bucket)

    return make_inputs
