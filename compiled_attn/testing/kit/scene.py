"""Tensors of a step, as expressions that a script can print and run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from compiled_attn.testing.kit.step import QUANTISED, Step
from compiled_attn.testing.kit.tensors import (
    filled,
    ints,
    normal,
    padded,
    uniform,
    units,
    widened,
)

__all__ = ["Expression", "Scene"]

_VALUES = 5  # of the seeds of a step


@dataclass(frozen=True)
class Expression:
    """A call of a function in `compiled_attn.testing.kit.tensors`, which prints as Python.

    Attributes:
        function: returns the tensor on the CPU.
        arguments: its arguments, which may be expressions.
        wide: axis along which the tensor is a view of a larger one, or None.
    """

    function: Callable[..., torch.Tensor]
    arguments: tuple[Any, ...]
    wide: int | None = None

    def make(self, device: str = "cpu") -> torch.Tensor:
        """Returns a new tensor."""
        values = [each.make() if isinstance(each, Expression) else each for each in self.arguments]
        tensor = self.function(*values).to(device)
        return tensor if self.wide is None else widened(tensor, self.wide)

    def text(self, device: str = "cpu") -> str:
        """Python that makes the tensor."""
        text = f"{self.function.__name__}({', '.join(map(repr, self.arguments))})"
        text = text if device == "cpu" else f"{text}.to({device!r})"
        return text if self.wide is None else f"widened({text}, {self.wide})"

    def __repr__(self) -> str:
        """As `text` for the CPU."""
        return self.text()


class Scene:
    """The tensors of a step, from which `Interface.arguments` builds the arguments of a call.

    Args:
        step: sizes and features.
        uniform_rows: whether padded requests have as many query rows as the others, not 0.

    Attributes:
        fields: expressions or plain values by name; T query rows, R requests:

            - query ``[T, H, D]``; key, value ``[T, Hk, D]`` of the same tokens
            - key_cache, value_cache ``[num_blocks, block_size, Hk, D]``
            - key_scale, value_scale ``[num_blocks, block_size, Hk]`` or None; k_scale, v_scale: one
              number for a whole cache
            - block_table ``[R, W]``; seq_lens ``[R]``, new tokens included; starts ``[R + 1]``, as
              query_start_loc; slots ``[T]``, as slot_mapping; counts: query rows per request
            - slopes, sinks ``[H]``; cos, sin ``[capacity, rotary / 2]``; projection
              ``[H, value_dim, value_dim]`` of MLA
            - scale, causal, window, softcap, append, lse, block_size, capacity (``W *
              block_size``), cache_dtype (name of a quantised dtype or None), latent, strided
        real: query rows that belong to a request.
        owned: (block, offset) pairs of the keys of each request.
    """

    def __init__(self, step: Step, uniform_rows: bool = False) -> None:
        self.step = step
        rows = step.requests[0][0] if uniform_rows and step.requests else 0
        self.sizes = [*step.requests, *[(rows, 0)] * step.padded_requests]
        self.tables, self.num_blocks = self._tables()
        self.owned = [
            [(table[at // step.block_size], at % step.block_size) for at in range(keys)]
            for table, (_, keys) in zip(self.tables, self.sizes, strict=True)
        ]
        self.real = [*range(sum(rows for rows, _ in step.requests))]
        self.tokens = sum(rows for rows, _ in self.sizes) + step.padding
        self.fields = self._fields()

    def make(self, device: str = "cpu") -> SimpleNamespace:
        """Returns new tensors and the plain values as attributes."""
        return SimpleNamespace(
            **{
                name: value.make(device) if isinstance(value, Expression) else value
                for name, value in self.fields.items()
            }
        )

    def rows_of(self, request: int) -> range:
        """Query rows of a request."""
        start = sum(rows for rows, _ in self.sizes[:request])
        return range(start, start + self.sizes[request][0])

    def _tables(self) -> tuple[list[list[int]], int]:
        """Returns shuffled block tables, with the largest id and stale entries, and num_blocks."""
        s, rng = self.step, random.Random(self.step.seed)
        num_blocks = s.first_block + 2 + len(self.sizes) * s.width
        free = rng.sample(range(s.first_block, num_blocks), num_blocks - s.first_block)
        largest = free.index(num_blocks - 1)
        free[largest], free[-1] = free[-1], free[largest]
        prefix = [free.pop() for _ in range(s.shared)]
        tables = []
        for rows, keys in self.sizes:
            fits = keys - rows >= s.shared * s.block_size
            table = [*prefix] if fits else []
            table += [free.pop() for _ in range(s.blocks_of(keys) - len(table))]
            tables.append(table)
        for table in tables:  # unused entries: first a free block, then any
            if len(table) < s.width:
                table.append(rng.choice(free or [0]))
            table += rng.choices(range(num_blocks), k=s.width - len(table))
        return tables, num_blocks

    def _fields(self) -> dict[str, Any]:
        s, tokens = self.step, self.tokens
        value_dim = s.value_dim or s.head_dim
        slots_of_rows = [0] * tokens
        for request, (rows, keys) in enumerate(self.sizes):
            for row, position in zip(self.rows_of(request), range(keys - rows, keys), strict=True):
                if position >= 0:
                    block, slot = self.owned[request][position]
                    slots_of_rows[row] = block * s.block_size + slot
        starts = [0]
        for rows, _ in self.sizes:
            starts.append(starts[-1] + rows)
        fields: dict[str, Any] = {
            "causal": s.causal, "window": s.window, "softcap": s.softcap,
            "append": s.append, "lse": s.lse,
            "scale": s.head_dim**-0.5 if s.scale is None else s.scale, "cache_dtype": s.cache,
            "block_size": s.block_size, "capacity": s.capacity, "latent": s.latent,
            "strided": s.strided, "counts": [rows for rows, _ in self.sizes],
            "query": self._rows(1, s.heads, s.head_dim, s.spread),
            "key": self._rows(2, s.kv_heads, s.head_dim),
            "value": None if s.latent else self._values(value_dim),
            "key_cache": self._cache(4, s.head_dim, 1.0),
            "value_cache": None if s.latent else self._cache(_VALUES, value_dim, 1.0),
            "key_scale": self._scales(6, 1.0), "value_scale": self._scales(7, 1.5),
            "k_scale": 0.03, "v_scale": 0.05,
            "block_table": Expression(ints, (self.tables, s.index), self._wide(1)),
            "seq_lens": Expression(ints, ([keys for _, keys in self.sizes], s.index)),
            "starts": Expression(ints, (starts, torch.int32)),
            "slots": Expression(ints, (slots_of_rows, torch.int64)),
            "slopes": Expression(uniform, (self._seed(8), (s.heads,), 0.05, 0.8)) if s.alibi else
            None,
            "sinks": Expression(uniform, (self._seed(9), (s.heads,), -1.0, 3.0)) if s.sinks else
            None,
            "cos": None, "sin": None, "projection": None,
        }  # fmt: skip
        if s.latent:
            square = (s.heads, value_dim, value_dim)
            fields["projection"] = Expression(normal, (self._seed(10), square, s.dtype, 0.3))
        if s.rotary:
            shape = (s.capacity, s.rotary // 2)
            for name, seed in (("cos", 11), ("sin", 12)):
                fields[name] = Expression(normal, (self._seed(seed), shape, s.dtype, 0.7))
        return fields

    def _seed(self, which: int) -> int:
        return 100 * self.step.seed + which

    def _wide(self, axis: int) -> int | None:
        return axis if self.step.strided else None

    def _rows(self, which: int, heads: int, dim: int, spread: float = 1.0) -> Expression:
        """Query rows; padding rows are NaN."""
        s = self.step
        real = len(self.real)
        rows: tuple[Any, ...] = (self._seed(which), (real, heads, dim), s.dtype, spread)
        if self.tokens == real:
            return Expression(normal, rows, self._wide(1))
        return Expression(padded, (Expression(normal, rows), self.tokens), self._wide(1))

    def _values(self, dim: int) -> Expression:
        """Values of the query rows."""
        if not self.step.units:
            return self._rows(3, self.step.kv_heads, dim)
        rows = [
            self._elements(request, position, dim)
            for request, (count, keys) in enumerate(self.sizes)
            for position in range(keys - count, keys)
        ]
        rows += [[-1] * self.step.kv_heads] * self.step.padding
        return Expression(units, (rows, dim, self.step.dtype), self._wide(1))

    def _elements(self, request: int, position: int, dim: int) -> list[int]:
        """The element of each KV head that is not zero in the value of a key; -1: none.

        Each head has ``dim`` keys with a value: head h of request r the group ``r * Hk + h`` of
        keys, of the last request the group h from the end.
        """
        heads, (_, keys) = range(self.step.kv_heads), self.sizes[request]
        group, element = divmod(position, dim)
        last = (keys - 1) // dim if request == len(self.sizes) - 1 else None
        groups = [request * len(heads) + h if last is None else last - h for h in heads]
        return [element if group == each else -1 for each in groups]

    def _cache(self, which: int, dim: int, spread: float) -> Expression:
        """A cache whose used slots are random; with ``append`` the call's new slots are unused."""
        s = self.step
        dtype = QUANTISED[s.cache] if s.cache else s.dtype
        owned = self._held()
        shape = (self.num_blocks, s.block_size, s.kv_heads, dim)
        size = {"int8": 25.0, "fp8_e4m3": 30.0}.get(s.cache or "", 20.0) if s.cache else spread
        rows = Expression(normal, (self._seed(which), (len(owned), *shape[2:]), dtype, size))
        if s.units and which == _VALUES:
            keys = {at: (request, position) for request, slots in enumerate(self.owned)
                    for position, at in enumerate(slots)}  # fmt: skip
            elements = [self._elements(*keys[at], dim) for at in owned]
            rows = Expression(units, (elements, dim, dtype))
        at = [block for block, _ in owned], [slot for _, slot in owned]
        return Expression(filled, (shape, s.unowned, at, rows), 1 if s.gaps else self._wide(2))

    def _scales(self, which: int, factor: float) -> Expression | None:
        s = self.step
        if s.cache is None:
            return None
        owned, shape = self._held(), (self.num_blocks, s.block_size, s.kv_heads)
        limits = 0.02 * factor, 0.06 * factor
        rows = Expression(uniform, (self._seed(which), (len(owned), s.kv_heads), *limits))
        at = [block for block, _ in owned], [slot for _, slot in owned]
        return Expression(filled, (shape, s.unowned, at, rows), 1 if s.gaps else self._wide(2))

    def _held(self) -> list[tuple[int, int]]:
        """Returns the slots that hold a token before the call."""
        held: dict[tuple[int, int], None] = {}
        for slots, (rows, _) in zip(self.owned, self.sizes, strict=True):
            held.update(dict.fromkeys(slots[: len(slots) - rows * self.step.append]))
        return sorted(held)

    def __str__(self) -> str:
        return str(self.step)
