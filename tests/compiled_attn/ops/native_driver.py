"""Runs every case of the ops in a sanitizer build; started by cpu/test_sanitizers.py."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product

import torch

from compiled_attn.ops import NativeOps, load
from compiled_attn.ops.cpu import kernel_tuning
from compiled_attn.ops.cpu.kernel_tuning import KernelTuning
from tests.compiled_attn.ops.cpu.test_replayer import CALLS, assert_moved
from tests.compiled_attn.ops.native_cases import CASES, MIXED
from tests.compiled_attn.ops.native_scene import Scene, assert_right, new_tokens, scene
from tests.compiled_attn.ops.packed_layers import ROWS, SIZES, assert_product, layer, packed_as
from tests.compiled_attn.ops.states.state_cases import LAYERS, Draw, alone
from tests.compiled_attn.ops.test_reference import BAD_NUMBERS, BAD_SHAPES, WRITES
from tests.compiled_attn.ops.test_sampling import (
    DTYPES,
    KINDS,
    draws_of,
    of_sorted,
    rows_of,
    settle,
)
from tests.compiled_attn.ops.test_sampling import SIZES as VOCABULARIES

DRAWS = [
    (0.0, 1, 1.0, 0.0, 0.0), (0.8, 10**9, 1.0, 0.0, 0.99), (3.0, 10**9, 0.9, 0.0, 0.9999),
    (0.8, 50, 0.9, 0.05, 0.3), (0.8, 1025, 1.0, 0.0, 0.7), (1e-200, 10**9, 1.0, 1.0, 0.5),
    (1e300, 10**9, 0.5, 0.0, 0.5), (1.0, 10**9, 1.0, 1e-3, 0.5),
]  # fmt: skip
"""Temperature, top-k, top-p, min-p, uniform."""


def main(isa: str, tiles: str) -> None:
    """Runs all cases, writes and errors; a finding of a sanitizer ends the process."""
    ops = load(isa, sanitize=("address", "undefined"), plain_tiles=tiles == "plain")
    for case in CASES.values():
        step = scene(**case)
        assert_right(ops.paged_attention(*step.arguments, **step.options), step)
        if tiles == "plain":
            step = scene(**{**case, "dtype": torch.bfloat16, "cache_dtype": None})
            assert_right(ops.paged_attention(*step.arguments, **step.options), step)
    for case in WRITES.values():
        step = scene(MIXED, padding=2, padded_requests=1, poison=0.5, **case)
        assert_right(_write(ops, step), step)
    for spoil in (*BAD_NUMBERS.values(), *BAD_SHAPES.values()):
        step = scene(MIXED)
        spoil(step)
        try:
            ops.paged_attention(*step.arguments, **step.options)
        except RuntimeError:
            continue
        raise AssertionError("a bad call was accepted")
    for case in ({}, {"cache_dtype": torch.int8}, {"dim": 7, "dtype": torch.bfloat16}):
        step = scene([(3, 9), (90, 300)], **case)
        poisoned = step.options.get("value_scale", step.value_cache)
        poisoned[step.block_table[:2, 2].long(), 0] = torch.nan  # of keys that later rows see alone
        out, _ = ops.paged_attention(*step.arguments, **step.options)
        assert out[0].isfinite().all() and out[2].isnan().any()
    tuning = replace(KernelTuning.default("amx_bf16"), linear_bf16_weights="amx")
    kernel_tuning.apply(ops.build.library, tuning)
    for rows, sizes, kind in product(ROWS, SIZES, ("bfloat16", "float32", "bf16-widen")):
        input, weight, bias = layer(rows, *sizes, kind=kind)
        packed = packed_as(kind, weight)
        assert_product(ops.packed_linear(input, packed, bias), input, weight, bias)
        gate, up = (each.double() for each in ops.packed_linears(input, [packed] * 2))
        gated = ops.packed_swiglu(input, [packed] * 2).double()
        torch.testing.assert_close(gated, gate * gate.sigmoid() * up, rtol=2**-7, atol=1e-5)
        ids = torch.tensor([0, len(weight) - 1])
        assert torch.equal(ops.packed_rows(packed, ids), weight[ids])
    for kind in KINDS:
        for vocab in VOCABULARIES:
            for dtype in DTYPES:
                logits = rows_of(kind, len(DRAWS), vocab).to(dtype)
                tokens = settle(ops, logits, draws_of(*DRAWS)).tolist()
                rows = zip(logits, DRAWS, strict=True)
                assert tokens == [of_sorted(row, *draw) for row, draw in rows]
    for dtype, make_layer in product(DTYPES, LAYERS.values()):
        of_states = make_layer(Draw(dtype), 9)
        exact, _ = alone(None, of_states.to_double())
        out, _ = alone(ops, of_states)
        torch.testing.assert_close(out.double(), exact, rtol=2**-6, atol=2**-6)
    for make in CALLS.values():
        assert_moved(ops, ops.replayer(), make)
    print("clean", len(CASES), len(WRITES))


def _write(ops: NativeOps, step: Scene) -> tuple[torch.Tensor, torch.Tensor]:
    key, value, slots = new_tokens(step)
    return ops.paged_attention_(
        step.query, key, value, step.key_cache, step.value_cache, slots, *step.step,
        **step.options,
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
