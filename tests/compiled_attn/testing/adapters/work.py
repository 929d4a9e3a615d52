"""A step of three requests over pages, for the adapters that run here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_attn.ops import reference

LENGTHS = (21, 5, 40)
COUNTS = (1, 5, 3)


def step(counts: tuple[int, ...] = COUNTS, lengths: tuple[int, ...] = LENGTHS) -> dict[str, Any]:
    """Arguments of `paged_attention`: blocks of 16, 4 query heads over 2, free slots hold 0."""
    generator = torch.Generator().manual_seed(0)
    caches = torch.randn(2, 12, 16, 2, 16, generator=generator)
    table = torch.zeros(len(lengths), 4, dtype=torch.int32)
    free = iter((7, 3, 11, 1, 5, 9, 2, 8))
    is_owned = torch.zeros(12, 16, dtype=torch.bool)
    for row, length in zip(table, lengths, strict=True):
        for at in range(-(-length // 16)):
            row[at] = next(free)
            is_owned[row[at], : length - 16 * at] = True
    caches[:, ~is_owned] = 0
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    return {
        "query": torch.randn(sum(counts), 4, 16, generator=generator),
        "key_cache": caches[0], "value_cache": caches[1], "block_table": table,
        "seq_lens": torch.tensor(lengths, dtype=torch.int32), "query_start_loc": starts,
        "scale": 0.25,
    }  # fmt: skip


def expected(arguments: dict[str, Any], **options: Any) -> Tensor:
    """The same step by the reference, in float64."""
    names = ("query", "key_cache", "value_cache")
    wide = {name: arguments[name].double() for name in names}
    return reference.paged_attention(**arguments | wide, **options)[0]
