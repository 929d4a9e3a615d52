"""The inputs of one decode step, and how they grow to the fixed shapes of a bucket."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from compiled_attn.compat.paged.layouts import expect

__all__ = ["PagedInputs"]


class PagedInputs(NamedTuple):
    """The inputs of `PagedAttention`, in the order of its ``forward``.

    Shape:
        - query: ``[S, H, D]``
        - block_tables: ints ``[S, W]``
        - seq_lens: ints ``[S]``
        - key, value: ``[S, Hk, D]`` or None
        - slot_mapping: ints ``[S]`` or None
    """

    query: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    key: Tensor | None = None
    value: Tensor | None = None
    slot_mapping: Tensor | None = None

    def padded(self, num_seqs: int, width: int) -> PagedInputs:
        """The same inputs in a bucket of ``num_seqs`` rows and ``width`` columns of the tables.

        Added rows have no tokens and a negative slot: they give zeros and write nowhere.

        Raises:
            PagedArgumentError: the bucket is too small.
        """
        rows, columns = self.block_tables.shape
        more, wider = num_seqs - rows, width - columns
        fits = more >= 0 and wider >= 0
        need = f"a bucket of at least {rows} rows and {columns} columns"
        expect(fits, need, (num_seqs, width), "pick a larger bucket")
        fields = [None if each is None else _grown(each, more) for each in self]
        inputs = PagedInputs(*fields)  # type: ignore[arg-type]
        slots = self.slot_mapping
        return inputs._replace(
            block_tables=F.pad(inputs.block_tables, (0, wider)),
            slot_mapping=None if slots is None else F.pad(slots, (0, more), value=-1),
        )


def _grown(tensor: Tensor, rows: int) -> Tensor:
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, rows))
