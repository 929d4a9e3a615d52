"""A shadow of a paged cache: what each slot holds, written and checked by the calls of a step.

Each slot and layer has a *tag*: a hash of the tokens up to the one whose key and value are there,
so of the position too; 0 is unwritten. The host says before a step which tags belong where
(`SlotShadow.fill`), from what it knows of the requests and never from the tensors of the step. The
call that writes keys writes tags, and the call that reads keys compares tags, both through the
tensors that it was given. All of it is plain torch of fixed shapes without a host read, so that it
is part of captured graphs; the host reads `SlotShadow.errors` after the step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

__all__ = [
    "FIELDS",
    "FINE",
    "LayerShadow",
    "SlotShadow",
    "StepShadow",
    "StepTruth",
    "check_layer",
    "first_of",
]

FINE = 1 << 62
"""Index of the first error where there is none."""

FIELDS = 8
"""Numbers of an error."""


class StepTruth(NamedTuple):
    """What the host knows of a step.

    Shape (R requests, T tokens, N changed tags):
        - rows: ``[R]``, the row of the shadow that each request has
        - lengths, counts: ``[R]``, tokens with those of this step, and those of this step
        - ids, positions, tags, slots, sums: ``[T]``, of each new token its id, position, tag and
          slot, and the sum of ``tag * (2 * position + 1)`` over it and the tokens before it
        - request: ``[T]``, its request
        - changed_rows, changed_positions, changed_tags: ``[N]``
    """

    rows: NDArray[np.int64]
    lengths: NDArray[np.int64]
    counts: NDArray[np.int64]
    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    tags: NDArray[np.int64]
    slots: NDArray[np.int64]
    sums: NDArray[np.int64]
    request: NDArray[np.int64]
    changed_rows: NDArray[np.int64]
    changed_positions: NDArray[np.int64]
    changed_tags: NDArray[np.int64]


class StepShadow(NamedTuple):
    """What all layers of a step compare; the blocks and the rest are None if nothing is read.

    Shape (T tokens, N entries of blocks):
        - slots: ``[T]`` int64, where each token belongs; 0: padding, anywhere in null block 0
        - tags: ``[T]`` int32, of each token; 0: padding
        - blocks: ``[N]`` int64, the blocks that the step reads
        - expected: ``[N, block_size]`` int32, the tag of each slot; 0: the slot is not read
        - request, starts: ``[N]`` int64, whose they are, and the position of their first slot
        - error: ``[8]`` int64, where the first error goes; None: to that of the layer
    """

    slots: Tensor
    tags: Tensor
    blocks: Tensor | None
    expected: Tensor | None
    request: Tensor | None
    starts: Tensor | None
    error: Tensor | None = None


class LayerShadow(NamedTuple):
    """The tags ``[num_blocks, block_size]`` int32 of a layer, its error ``[8]`` int64, the step."""

    tags: Tensor
    error: Tensor
    step: StepShadow


class SlotShadow(nn.Module):
    """The buffers that the host fills before a step, and the errors of each layer.

    The tags themselves are buffers of the cache (``tag_0`` ..), so that copies of blocks move them.

    Args:
        layers: layers of the cache.
        block_size: slots in a block.
        requests, tokens, width: the most rows, tokens and blocks of a request of a step.
        device: device of the cache.

    Shape:
        - errors: ``[layers + 2, 8]`` int64: of each layer, of the rows of the last layer that need
          logits, and of the step
    """

    def __init__(
        self,
        layers: int,
        block_size: int,
        requests: int,
        tokens: int,
        width: int,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.layers, self.block_size, self.requests = layers, block_size, requests
        context = width * block_size

        def buffer(name: str, *shape: int, dtype: torch.dtype = torch.int64) -> None:
            zeros = torch.zeros(shape, dtype=dtype, device=device)
            self.register_buffer(name, zeros, persistent=False)

        buffer("expected", requests + 1, context, dtype=torch.int32)  # the last row is padding
        for name in ("rows", "lengths", "counts"):
            buffer(name, requests)
        for name in ("ids", "positions", "slots", "sums", "request"):
            buffer(name, tokens)
        buffer("tags", tokens, dtype=torch.int32)
        buffer("logits", 1)
        for layer in range(layers + 2):
            buffer(f"error_{layer}", FIELDS)

    def fill(self, truth: StepTruth, logits: int) -> None:
        """Sets what the next step must find; ``logits`` of its rows need logits."""
        device = self.get_buffer("rows").device

        def put(name: str, values: NDArray[np.int64], rest: int = 0) -> None:
            buffer = self.get_buffer(name)
            whole = np.full(len(buffer), rest, np.int64)
            whole[: len(values)] = values
            buffer.copy_(torch.from_numpy(whole))

        put("rows", truth.rows, self.requests)
        for name in ("lengths", "counts", "ids", "positions", "slots", "sums", "request", "tags"):
            put(name, getattr(truth, name))
        self.get_buffer("logits").fill_(logits)
        self.error(self.layers + 1).fill_(FINE)
        if len(truth.changed_rows):
            at, positions, tags = (torch.from_numpy(each).to(device) for each in truth[-3:])
            self.get_buffer("expected").index_put_((at, positions), tags.int())

    def reset(self) -> None:
        """Forgets the errors of earlier steps."""
        for layer in range(self.layers + 2):
            self.error(layer).fill_(FINE)

    def errors(self) -> Tensor:
        """Reads the errors of the last step, which waits for it."""
        rows = [self.error(layer) for layer in range(self.layers + 2)]
        return torch.stack(rows).cpu()

    # What follows is traced.

    def error(self, layer: int) -> Tensor:
        """The error ``[8]`` int64 of a layer; ``layers``: of the rows of logits; then the step."""
        return self.get_buffer(f"error_{layer}")

    def first(self, name: str, count: int) -> Tensor:
        """The first elements of a buffer."""
        return self.get_buffer(name)[:count]


def first_of(wrong: Tensor) -> Tensor:
    """Index of the first True of ``[n]``, or `FINE`: ``[1]`` int64."""
    # Not a scalar, by which compilers index a tensor on the host.
    index = torch.arange(wrong.shape[0], device=wrong.device)
    return torch.where(wrong, index, FINE).amin(0, keepdim=True)


def check_layer(shadow: LayerShadow, slots: Tensor | None, *, reads: bool = True) -> None:
    """Writes the tags of a step to ``slots [T]``, checks them, and checks those that it reads.

    The error of the layer becomes the first wrong token, its slot and the tag that was there; then
    the first wrong slot of all entries, the block, the tag there, its request and its position.

    Args:
        slots: where the call writes its tokens; None: it only reads.
        reads: whether it reads.
    """
    tags, error, step = shadow
    found = []
    if slots is not None:
        found += _write(tags, step, slots.long())
    else:
        found += [torch.full((1,), FINE, device=tags.device)] * 3
    if reads and step.blocks is not None:
        found += _read(tags, step)
    found += [torch.full_like(found[0], FINE)] * (FIELDS - len(found))
    error.copy_(torch.cat(found))


def _write(tags: Tensor, step: StepShadow, slots: Tensor) -> list[Tensor]:
    size, flat = tags.shape[1], tags.view(-1)
    is_known = (slots >= 0) & (slots < flat.shape[0])
    at = torch.where(is_known, slots, 0)
    is_null = at < size
    before = flat[at]
    is_padding = step.tags == 0
    wrong = torch.where(is_padding, ~(is_known & is_null), slots != step.slots)
    wrong = wrong | (~is_padding & ~is_null & (before != 0) & (before != step.tags))
    flat.index_copy_(0, at, torch.where(is_null, 0, step.tags))
    token = first_of(wrong)
    which = token.clamp_max(slots.shape[0] - 1)
    return [token, slots[which], before[which].long()]


def _read(tags: Tensor, step: StepShadow) -> list[Tensor]:
    blocks, expected, request, starts = step[2:6]
    assert blocks is not None and expected is not None
    assert request is not None and starts is not None
    there = torch.where((blocks >= 0) & (blocks < tags.shape[0]), blocks, 0)
    # In 32 bits and by block first, so that compilers vectorise it.
    entry = first_of(_difference(tags[there], expected).abs().amax(-1) != 0)
    which = entry.clamp_max(expected.shape[0] - 1)
    row = tags[there[which]].view(-1)
    offset = first_of(_difference(row, expected[which].view(-1)) != 0).clamp_max(len(row) - 1)
    return [entry, blocks[which], row[offset].long(), request[which], starts[which] + offset]


def _difference(tags: Tensor, expected: Tensor) -> Tensor:
    return torch.where(expected == 0, 0, tags - expected)
