"""Compares the usual tiles for sm_90 with those for all other devices, on one device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch

from accelerator.timing import medians


class Kind(NamedTuple):
    """A step: what tiles depend on."""

    step: str
    dim: int
    value_dim: int
    kv_heads: int
    group: int
    dtype: str
    codes: str = "none"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Requests, queries and keys of each."""
        if self.step == "decode 64 x 4k":
            return 64, 1, 4096
        return (1, 2048, 2048) if self.dtype == "float32" else (2, 4096, 4096)

    @property
    def flops(self) -> float:
        """Operations of causal attention."""
        requests, queries, keys = self.sizes
        pairs = requests * (queries * keys - queries * (queries - 1) / 2)
        return 2.0 * self.kv_heads * self.group * (self.dim + self.value_dim) * pairs

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values, without scales."""
        requests, _, keys = self.sizes
        size = 1 if self.codes != "none" else getattr(torch, self.dtype).itemsize
        return requests * keys * self.kv_heads * (self.dim + self.value_dim) * size


NAMES = "hopper", "others"
_HEADS = {64: (64, 64, 8, 4), 128: (128, 128, 8, 4), 256: (256, 256, 4, 4), 576: (576, 512, 1, 16)}
_DTYPES = ("bfloat16",), ("bfloat16", "e4m3"), ("bfloat16", "int8"), ("float32",)
KINDS = [
    Kind(step, *heads, *dtype)
    for step in ("decode 64 x 4k", "prefill")
    for dtype in _DTYPES
    for dim, heads in _HEADS.items()
    if (dtype != ("float32",) or dim <= 128) and (dtype[-1] != "int8" or dim == 128)
]


def row(kind: Kind, device: torch.device, rounds: int, calls: int) -> dict[str, Any]:
    """Its tiles, for sm_90 and for others, and the seconds of both."""
    from compiled_attn.ops.triton.launch import attend, compile_plan

    call, plans = _call_and_plans(kind, device)
    with ThreadPoolExecutor(len(plans)) as threads:
        list(threads.map(partial(compile_plan, call), plans.values()))
    kernels = {name: partial(_attend, attend, call, each) for name, each in plans.items()}
    seconds, _ = medians(kernels, rounds, calls, device)
    return {
        "kind": kind._asdict(),
        "plans": {name: [*each.tile, each.splits] for name, each in plans.items()},
        "seconds": seconds,
        "tflops": kind.flops / seconds["hopper"] / 1e12,
        "gbytes": kind.kv_bytes / seconds["hopper"] / 1e9,
    }


def _call_and_plans(kind: Kind, device: torch.device) -> tuple[Any, dict[str, Any]]:
    from compiled_attn.ops.triton.autotune import call_of
    from compiled_attn.ops.triton.plans import chip_of
    from compiled_attn.ops.triton.tiles import Problem, plan

    requests, queries, keys = kind.sizes
    problem = Problem(
        requests * queries, requests, kind.kv_heads, kind.group, kind.dim, kind.value_dim,
        keys, 16, kind.dtype, kind.codes,
    )  # fmt: skip
    call = call_of(problem, device)
    call = call._replace(seq_lens=torch.full_like(call.seq_lens, keys))
    chips = {name: chip_of(device)._replace(is_hopper=name == "hopper") for name in NAMES}
    return call, {name: plan(problem, chip) for name, chip in chips.items()}


def format_row(row: dict[str, Any]) -> str:
    """Return a row as text."""
    kind, seconds = Kind(**row["kind"]), row["seconds"]
    dtype = kind.dtype if kind.codes == "none" else kind.codes
    sizes = {
        name: f"{rows}x{keys}, {warps}w, {stages}s, /{splits}"
        for name, (rows, keys, warps, stages, splits) in row["plans"].items()
    }
    return (
        f"{kind.step:>15} D {kind.dim:<4}{dtype:>9} {sizes['hopper']:>20} "
        f"{1e6 * seconds['hopper']:8.1f} us {row['tflops']:6.1f} TFLOP/s {row['gbytes']:6.0f} GB/s "
        f"{seconds['others'] / seconds['hopper']:5.2f}x of {sizes['others']}"
    )


def _attend(attend: Any, call: Any, plan: Any, _: int) -> object:
    return attend(call, plan)
