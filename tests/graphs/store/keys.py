"""Computes keys of graphs in tests."""

from __future__ import annotations

import torch

from graphs.store import graph_factors, key_of

X = torch.ones(2, 4)


def key(function, *inputs, backend="inductor", **options):
    with torch.no_grad():
        return key_of(graph_factors(function, inputs, backend=backend, options=options))
