"""Legal calls of everything that writes, to be repeated with an index in the memory it writes.

``python -m tests.compiled_attn.arguments.overlap_calls native`` repeats those of the native kernel,
in a process of its own: an index that changes after it was checked is followed anywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compiled_attn import UnifiedMetadata, flash_attn_with_kvcache, unified_attention
from compiled_attn.compat.paged import (
    PagedAttention,
    paged_attention_v1,
    paged_attention_v2,
    reshape_and_cache,
)
from compiled_attn.ops import load
from compiled_attn.ops.reference import paged_attention_
from tests.compiled_attn.attention.unified_call import CACHES
from tests.compiled_attn.attention.unified_call import Call as UnifiedCall

ROWS, SIZE, HEADS, DIM = 6, 4, 2, 16  # new tokens, block size, KV heads


@dataclass(frozen=True)
class Call:
    """A legal call: by name what it writes and what it reads as an index."""

    function: Callable[..., object]
    arguments: dict[str, Any]
    written: tuple[str, ...]
    indices: tuple[str, ...]

    def run(self) -> object:
        return self.function(**self.arguments)

    def with_memory(self, index: str, memory: Tensor) -> Call:
        """The same numbers in ``index``, stored at the start of ``memory``."""
        numbers = self.arguments[index]
        view = as_dtype(memory, numbers.dtype)[: numbers.numel()].view(numbers.shape)
        view.copy_(numbers)
        return replace(self, arguments={**self.arguments, index: view})

    def refusal(self, index: str, written: str) -> str:
        """What is wrong with how the call refuses ``index`` in the memory of ``written``; "" if
        nothing.
        """
        target = self.arguments[written]
        call = self.with_memory(index, target)
        before = [call.arguments[name].clone() for name in self.written]
        try:
            call.run()
        except (ValueError, RuntimeError) as error:
            if f"expected {index} apart from {written}, got shared memory: call" not in str(error):
                return f"refused with {error!r}"
        else:
            return "served"
        after = [call.arguments[name] for name in self.written]
        equal = all(
            torch.equal(as_dtype(a, torch.uint8), as_dtype(b, torch.uint8))
            for a, b in zip(before, after, strict=True)
        )
        return "" if equal else "refused after it wrote"

    def fits(self, index: str, written: str) -> bool:
        return self.arguments[index].nbytes <= self.arguments[written].nbytes


def as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The memory of a dense tensor as a vector of another dtype."""
    offset = tensor.storage_offset() * tensor.itemsize
    whole = torch.empty(0, dtype=dtype).set_(tensor.untyped_storage())
    return whole[offset // dtype.itemsize :][: tensor.nbytes // dtype.itemsize]


def ints(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def new_tokens() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(ROWS, HEADS, DIM), torch.randn(ROWS, HEADS, DIM), torch.randn(ROWS, 2, DIM)


def caches(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.zeros(8, SIZE, HEADS, DIM, dtype=dtype) for _ in range(2)]


def op(function: Callable[..., object], dtype: torch.dtype) -> Call:
    """Six tokens written to the first two blocks and attended."""
    query, key, value = new_tokens()
    key_cache, value_cache = caches(dtype)
    arguments = {
        "query": query, "key": key, "value": value, "key_cache": key_cache,
        "value_cache": value_cache, "slot_mapping": torch.arange(ROWS),
        "block_table": ints([[0, 1]]), "seq_lens": ints([ROWS]),
        "query_start_loc": ints([0, ROWS]), "scale": 0.25,
    }  # fmt: skip
    written: tuple[str, ...] = ("key_cache", "value_cache")
    if dtype == torch.int8:
        written = (*written, "key_scale", "value_scale")
        arguments |= {name: torch.ones(8, SIZE, HEADS) for name in written[2:]}
    indices = "slot_mapping", "block_table", "seq_lens", "query_start_loc"
    return Call(function, arguments, written, (*indices, "query", "key", "value"))


def by_request() -> UnifiedMetadata:
    """Six tokens of one request in blocks 1 and 2."""
    table, length, starts = ints([[1, 2]]), ints([ROWS]), ints([0, ROWS])
    slots = torch.arange(SIZE, SIZE + ROWS)
    step = {"block_tables": table, "seq_lens": length, "query_start_loc": starts}
    return UnifiedMetadata(SIZE, slots, **step)


def unified(kernel: str) -> Call:
    arguments = UnifiedCall().arguments
    by_parts = arguments.pop("metadata")
    if kernel == "native":
        arguments |= dict(zip(("query", "key", "value"), new_tokens(), strict=True))
        caches = {name: torch.zeros(32, HEADS, DIM, dtype=torch.int8) for name in CACHES[:2]}
        arguments |= caches | {name: torch.ones(32, HEADS) for name in CACHES[2:]}
    fields = vars(by_request() if kernel == "native" else by_parts)
    metadata = {name: each for name, each in fields.items() if isinstance(each, Tensor)}
    fixed = {name: each for name, each in fields.items() if name not in metadata}

    def function(**given: Any) -> object:
        own = {name: given.pop(name) for name in metadata}
        return unified_attention(**given, metadata=UnifiedMetadata(**fixed, **own), kernel=kernel)

    return Call(function, {**arguments, **metadata}, CACHES, (*metadata, "query", "key", "value"))


def flash(kernel: str, paged: bool) -> Call:
    k_cache, v_cache = caches()
    query, key, value = (each.view(2, 3, HEADS, DIM) for each in new_tokens())
    arguments: dict[str, Any] = {
        "q": query, "k": key, "v": value, "k_cache": k_cache, "v_cache": v_cache,
        "cache_seqlens": ints([1, 0]), "causal": True, "kernel": kernel,
    }  # fmt: skip
    if paged:
        arguments["block_table"] = ints([[0], [1]])
    else:
        arguments |= {"cache_batch_idx": ints([0, 1])}
    if kernel == "portable":
        arguments |= {"cache_leftpad": ints([1, 0])}
    indices = [name for name, each in arguments.items() if isinstance(each, Tensor)]
    indices = [name for name in indices if name not in ("q", "k_cache", "v_cache")]
    return Call(flash_attn_with_kvcache, arguments, ("k_cache", "v_cache"), tuple(indices))


def paged_write() -> Call:
    _, key, value = new_tokens()
    key_cache, value_cache = caches()
    arguments = {
        "key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache,
        "slot_mapping": torch.arange(ROWS), "kv_cache_dtype": "auto", "k_scale": 1.0,
        "v_scale": 1.0, "layout": "NHD",
    }  # fmt: skip
    return Call(reshape_and_cache, arguments, ("key_cache", "value_cache"), ("slot_mapping",))


def paged_module(kernel: str) -> Call:
    query, key, value = new_tokens()
    key_cache, value_cache = caches()

    def function(key_cache: Tensor, value_cache: Tensor, **given: Any) -> object:
        options: dict[str, Any] = {"layout": "NHD", "kernel": kernel}
        return PagedAttention(key_cache, value_cache, HEADS, SIZE, 0.25, **options)(**given)

    arguments = {
        "query": query, "key": key, "value": value, "key_cache": key_cache,
        "value_cache": value_cache, "slot_mapping": torch.arange(ROWS),
        "block_tables": ints([[0], [0], [0], [0], [1], [1]]),
        "seq_lens": ints([1, 2, 3, 4, 1, 2]),
    }  # fmt: skip
    indices = "slot_mapping", "block_tables", "seq_lens"
    return Call(function, arguments, ("key_cache", "value_cache"), indices)


def paged_attention(version: int, kernel: str) -> Call:
    query, _, _ = new_tokens()
    key_cache, value_cache = caches()
    written = {"out": torch.zeros_like(query)}
    function: Callable[..., object] = paged_attention_v1
    if version == 2:
        function = paged_attention_v2
        written |= {name: torch.zeros(ROWS, HEADS, 6) for name in ("exp_sum", "max_logits")}
        written["tmp_out"] = torch.zeros(ROWS, HEADS, 6, DIM)
    arguments = {
        **written, "query": query, "key_cache": key_cache, "value_cache": value_cache,
        "num_kv_heads": HEADS, "scale": 0.25, "block_tables": ints([[1]] * ROWS),
        "seq_lens": ints([2] * ROWS), "block_size": SIZE, "max_seq_len": SIZE,
        "alibi_slopes": None, "kv_cache_dtype": "auto", "k_scale": 1.0, "v_scale": 1.0,
        "layout": "NHD", "kernel": kernel,
    }  # fmt: skip
    return Call(function, arguments, tuple(written), ("block_tables", "seq_lens"))


PORTABLE: dict[str, Callable[[], Call]] = {
    "the op in Python": lambda: op(paged_attention_, torch.float32),
    "the op in Python, int8": lambda: op(paged_attention_, torch.int8),
    "unified attention": lambda: unified("portable"),
    "flash, rows": lambda: flash("portable", paged=False),
    "flash, pages": lambda: flash("portable", paged=True),
    "reshape_and_cache": paged_write,
    "PagedAttention": lambda: paged_module("portable"),
    "paged_attention_v1": lambda: paged_attention(1, "portable"),
    "paged_attention_v2": lambda: paged_attention(2, "auto"),
}
NATIVE: dict[str, Callable[[], Call]] = {
    "the op": lambda: op(load(strict=True).paged_attention_, torch.float32),
    "the op, int8": lambda: op(load(strict=True).paged_attention_, torch.int8),
    "unified attention": lambda: unified("native"),
    "flash, rows": lambda: flash("native", paged=False),
    "flash, pages": lambda: flash("native", paged=True),
    "PagedAttention": lambda: paged_module("native"),
    "paged_attention_v1": lambda: paged_attention(1, "native"),
}


def wrong(make: Callable[[], Call]) -> Iterator[str]:
    """What is wrong with the refusals of a call, every index in all that is written."""
    make().run()  # legal as it is
    tried, call = 0, make()
    for written in call.written:
        for index in call.indices:
            if call.fits(index, written):
                tried += 1
                says = make().refusal(index, written)
                if says:
                    yield f"{index} in {written}: {says}"
    if tried < len(call.indices):
        yield f"only {tried} tries"


if __name__ == "__main__":
    for name, make in {"native": NATIVE, "portable": PORTABLE}[sys.argv[1]].items():
        for problem in wrong(make):
            print(f"{name}: {problem}", flush=True)
    print("done")
