"""Mixers that mix tokens as those of transformers do, or in ways that no rewrite can serve."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def causal_conv1d_fn(x: Tensor, weight: Tensor, bias: Tensor | None = None, **_: object) -> Tensor:
    """A causal depthwise convolution of ``[1, C, T]``."""
    channels, width = weight.shape
    return F.conv1d(F.pad(x, (width - 1, 0)), weight.unsqueeze(1), bias, groups=channels)


def mamba2_chunk_scan(x: Tensor, **_: object) -> Tensor:
    """Anything."""
    return x


def mamba3_scan(x: Tensor) -> Tensor:
    """A function that nobody knows yet."""
    return x


class Since524:
    """Calls its cache as transformers 5.24 does."""

    def forward(self, x, cache: torch.nn.Module | None = None, *, scale: float = 2.0):
        return causal_conv1d_fn(x, torch.ones(4, 3)) * scale


class Mamba523:
    """As transformers 5.23."""

    def forward(self, x, cache_params=None):
        return causal_conv1d_fn(x, torch.ones(4, 3))


class Short523:
    """As other layers of transformers 5.23."""

    def forward(self, x, past_key_values=None):
        return causal_conv1d_fn(x, torch.ones(4, 3))


class Unknown:
    """Calls a function of a later version."""

    def forward(self, x, cache=None):
        return mamba3_scan(causal_conv1d_fn(x, torch.ones(4, 3)))


class Twice:
    """Scans forwards and backwards."""

    def forward(self, x, cache=None):
        return mamba2_chunk_scan(x) + mamba2_chunk_scan(x.flip(-1)).flip(-1)


class Heads:
    """Scans one head after another."""

    def forward(self, x, cache=None):
        return torch.cat([mamba2_chunk_scan(head) for head in x.chunk(2)])


class NoCache:
    """Gets no cache."""

    def forward(self, x):
        return causal_conv1d_fn(x, torch.ones(4, 3))


def with_closure(scale: float) -> type:
    """Returns a mixer whose forward is a closure."""

    class Closure:
        def forward(self, x, cache=None):
            return causal_conv1d_fn(x, torch.ones(4, 3)) * scale

    return Closure
