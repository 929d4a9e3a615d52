"""Replays of a recorded step with changed metadata, bit for bit next to fresh calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["BUCKETS", "Bucket", "Compared", "compare"]


class Bucket(NamedTuple):
    """Sizes that a recording is made for: tokens, requests, and pages of a request."""

    tokens: int
    requests: int
    pages: int


class Compared(NamedTuple):
    """Replays, and how many of them differ from a fresh call in any bit."""

    bucket: str
    replays: int
    different: int
    recorded: bool


BUCKETS = {
    "decode 16": Bucket(16, 16, 64),
    "decode 1": Bucket(1, 1, 512),
    "mixed 64": Bucket(64, 8, 64),
}
SMALL = {"decode 4": Bucket(4, 4, 4), "mixed 8": Bucket(8, 3, 3)}
_HEADS, _KV_HEADS, _PAGE = 8, 2, 16


def compare(
    name: str, bucket: Bucket, count: int, device: torch.device, dtype: torch.dtype, dim: int = 128
) -> Compared:
    """Records a step that writes and attends, and replays it with other metadata each time.

    The fresh call gets copies of all tensors, so it shares no memory with the recording.
    """
    chance = torch.Generator().manual_seed(0)
    blocks = bucket.requests * bucket.pages + 1
    caches = [torch.randn(blocks, _PAGE, _KV_HEADS, dim, generator=chance) for _ in range(2)]
    key_cache, value_cache = (cache.to(device, dtype) for cache in caches)
    static = [each.to(device) for each in _inputs(bucket, dim, dtype, chance)]

    def step(inputs: list[Tensor], key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        query, new_key, new_value, slots, table, lengths, starts = inputs
        out, lse = torch.ops.compiled_attn.paged_attention_(
            query, new_key, new_value, key, value, slots, table, lengths, starts, dim**-0.5
        )
        return out, lse

    replay, results, recorded = _recorded(lambda: step(static, key_cache, value_cache), device)
    different = 0
    for _ in range(count):
        for target, source in zip(static, _inputs(bucket, dim, dtype, chance), strict=True):
            target.copy_(source)
        own = key_cache.clone(), value_cache.clone()
        fresh = step([each.clone() for each in static], *own)
        replay()
        pairs = zip((*results, key_cache, value_cache), (*fresh, *own), strict=True)
        different += not all(_same_bits(got, want) for got, want in pairs)
    return Compared(name, count, different, recorded)


def _inputs(bucket: Bucket, dim: int, dtype: torch.dtype, chance: torch.Generator) -> list[Tensor]:
    """Query, new keys and values, slots, block table, lengths, starts of a random step.

    Some requests and tokens at the end are padding, whose tokens are written to the null block.
    """
    tokens, requests, pages = bucket

    def drawn(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=chance))

    real = drawn(1, min(tokens, requests))
    counts = [1] * real
    for _ in range(drawn(0, tokens - real) if tokens > requests else 0):
        counts[drawn(0, real - 1)] += 1
    lengths = [drawn(min(n, pages * _PAGE), pages * _PAGE) for n in counts]
    order = torch.randperm(requests * pages, generator=chance).int() + 1
    table = order.view(requests, pages)
    slots = torch.zeros(tokens, dtype=torch.int64)
    at = 0
    for request, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        for position in range(length - count, length):
            block = int(table[request, position // _PAGE])
            slots[at], at = block * _PAGE + position % _PAGE, at + 1
    counts += [0] * (requests - real)
    lengths += [0] * (requests - real)
    shapes = (tokens, _HEADS, dim), (tokens, _KV_HEADS, dim), (tokens, _KV_HEADS, dim)
    rows = [torch.randn(shape, generator=chance).to(dtype) for shape in shapes]
    rows[1][at:], rows[2][at:] = 0, 0  # written to one slot in any order
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    return [*rows, slots, table, torch.tensor(lengths).int(), starts]


def _recorded(
    call: Callable[[], tuple[Tensor, Tensor]], device: torch.device
) -> tuple[Callable[[], None], tuple[Tensor, Tensor], bool]:
    """A replay, its outputs, and whether it is one: elsewhere than on CUDA it calls again."""
    outputs = call()  # compiles
    if device.type != "cuda":

        def again() -> None:
            for target, source in zip(outputs, call(), strict=True):
                target.copy_(source)

        return again, outputs, False
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()
    return graph.replay, outputs, True


def _same_bits(got: Tensor, want: Tensor) -> bool:
    return torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))
