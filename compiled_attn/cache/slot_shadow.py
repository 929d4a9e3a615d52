"""Shadow memory of a paged cache: a tag per slot, written and checked by the calls of a step.

The *tag* of a slot and layer is a hash of all tokens up to the one whose key and value are stored
there, so it depends on the position too; 0 is unwritten. Before a step the host fills in the
expected tags (`SlotShadow.fill`), from the requests and never from the tensors of the step. The
call that writes keys writes tags, and the call that reads keys compares tags, both with the slots
and block tables that it was passed. This is plain torch with fixed shapes and no host read, so it
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
    "NOT_CALLED",
    "ExpectedStep",
    "LayerShadow",
    "SlotShadow",
    "StepShadow",
    "check_layer",
    "first_of",
]

FINE = 1 << 62
"""Stands for "no error" in an error record."""

NOT_CALLED = FINE - 1
"""Slot in the error record of a layer that no call of the step has used."""

FIELDS = 8
"""Integers of an error record."""

_NO_ENTRY = torch.iinfo(torch.int32).max


class ExpectedStep(NamedTuple):
    """What the host expects of a step.

    Shape (R requests, T tokens, N changed tags):
        - rows: ``[R]``, row of each request in ``SlotShadow.expected``
        - lengths, counts: ``[R]``, all tokens of a request, and its new tokens
        - ids, positions, tags, slots, sums: ``[T]`` of new tokens: id, position, tag, slot, and
          the sum of ``tag * (2 * position + 1)`` over the token and those before it
        - request: ``[T]``, index of its request in the step
        - changed_rows, changed_positions, changed_tags: ``[N]``, updates of ``expected``
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
    """What each layer of a step compares; ``blocks`` to ``starts`` are None if it reads nothing.

    Shape (T tokens, N entries of blocks):
        - slots: ``[T]`` int64, slot of each token; 0: padding, anywhere in null block 0
        - tags: ``[T]`` int32, tag of each token; 0: padding
        - blocks: ``[N]`` int64, the blocks that the step reads
        - expected: ``[N, block_size]`` int32, the tag of each slot; 0: the slot is not read
        - request, starts: ``[N]`` int64, their request, and the position of their first slot
        - error: ``[8]`` int64, receives the first error; None: the record of the layer does
    """

    slots: Tensor
    tags: Tensor
    blocks: Tensor | None
    expected: Tensor | None
    request: Tensor | None
    starts: Tensor | None
    error: Tensor | None = None


class LayerShadow(NamedTuple):
    """Tags ``[num_blocks, block_size]`` int32 of a layer, its error record, and the step."""

    tags: Tensor
    error: Tensor
    step: StepShadow


class SlotShadow(nn.Module):
    """Buffers that the host fills before a step, and the error records.

    The tags are buffers of the cache (``tag_0`` ..), so that copies of blocks copy them too.

    Args:
        layers: layers of the cache.
        block_size: slots in a block.
        requests, tokens: maximum rows and tokens of a step.
        width: maximum blocks of a request.
        device: device of the cache.

    Shape:
        - errors: ``[layers + 2, 8]`` int64: of each layer, of the rows that need logits in the last
          layer, and of the metadata of the step
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

        buffer("expected", requests + 1, context, dtype=torch.int32)  # the last row is for padding
        for name in ("rows", "lengths", "counts"):
            buffer(name, requests)
        for name in ("ids", "positions", "slots", "sums", "request"):
            buffer(name, tokens)
        buffer("tags", tokens, dtype=torch.int32)
        buffer("logits", 1)
        for layer in range(layers + 2):
            buffer(f"error_{layer}", FIELDS)

    def fill(self, step: ExpectedStep, logits: int) -> None:
        """Sets what to expect of the next step, of which ``logits`` rows need logits."""
        device = self.get_buffer("rows").device

        def put(name: str, values: NDArray[np.int64], rest: int = 0) -> None:
            buffer = self.get_buffer(name)
            whole = np.full(len(buffer), rest, np.int64)
            whole[: len(values)] = values
            buffer.copy_(torch.from_numpy(whole))

        put("rows", step.rows, self.requests)
        for name in ("lengths", "counts", "ids", "positions", "slots", "sums", "request", "tags"):
            put(name, getattr(step, name))
        self.get_buffer("logits").fill_(logits)
        self.error(self.layers + 1).fill_(FINE)
        for layer in range(self.layers):
            self.error(layer)[1] = NOT_CALLED
        if len(step.changed_rows):
            at, positions, tags = (torch.from_numpy(each).to(device) for each in step[-3:])
            self.get_buffer("expected").index_put_((at, positions), tags.int())

    def reset(self) -> None:
        """Clears all error records."""
        for layer in range(self.layers + 2):
            self.error(layer).fill_(FINE)

    def errors(self) -> Tensor:
        """Returns the error records on the CPU; waits for the step."""
        rows = [self.error(layer) for layer in range(self.layers + 2)]
        return torch.stack(rows).cpu()

    # The methods below are traced.

    def error(self, layer: int) -> Tensor:
        """Returns the error record ``[8]`` int64 of a layer.

        Index ``layers``: the rows that need logits; ``layers + 1``: the metadata of the step.
        """
        return self.get_buffer(f"error_{layer}")

    def first(self, name: str, count: int) -> Tensor:
        """Returns the first elements of a buffer."""
        return self.get_buffer(name)[:count]


def first_of(wrong: Tensor) -> Tensor:
    """Returns the index of the first True of ``[n]``, or `FINE`, as ``[1]`` int64."""
    # Not a scalar: compilers would read it on the host to index a tensor.
    index = torch.arange(wrong.shape[0], device=wrong.device)
    return torch.where(wrong, index, FINE).amin(0, keepdim=True)


def check_layer(
    shadow: LayerShadow, slots: Tensor | None, *, reads: bool = True, keeps_first: bool = True
) -> None:
    """Writes the tags of a step to ``slots [T]`` and checks them and the tags that it reads.

    Sets the error record: index of the first wrong token, its slot and the previous tag; then index
    of the first wrong slot that is read, its block, tag, request and position.

    Args:
        shadow: tags and error record of the layer, and the step.
        slots: slots that the call writes; None: it only reads.
        reads: whether the call reads.
        keeps_first: keep an earlier error of the step; False, which is faster: the layer is called
            once in a step.
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
    new = torch.cat(found)
    if keeps_first:
        new = torch.where((error[:1] != FINE) | (error[3:4] != FINE), error, new)
    error.copy_(new)


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
    # By offset in the block first and in 32 bits, so that compilers vectorise it.
    entries = torch.arange(expected.shape[0], dtype=torch.int32, device=tags.device)[:, None]
    is_wrong = (expected != 0) & (tags[there] != expected)
    by_offset = torch.where(is_wrong, entries, _NO_ENTRY).amin(0)
    entry = by_offset.amin(0, keepdim=True)
    offset = first_of(by_offset == entry)
    which = entry.long().clamp_max(expected.shape[0] - 1)
    tag = tags[there[which], offset].long()
    entry = torch.where(entry == _NO_ENTRY, FINE, entry.long())
    return [entry, blocks[which], tag, request[which], starts[which] + offset]
