"""The state ops in steps of several requests: bits, isolation, errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from compiled_attn.errors import KernelArgumentError
from compiled_attn.ops import NativeOps
from tests.compiled_attn.ops.kernels import BEST, SLOW, loaded, threads
from tests.compiled_attn.ops.states.state_cases import (
    DTYPES,
    LAYERS,
    Draw,
    Layer,
    alone,
    concatenated,
    delta,
    run,
    same,
    scan,
    ssd,
    tables,
)

pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.fixture(params=["reference", BEST, *SLOW], scope="module")
def ops(request) -> NativeOps:
    return loaded(request.param)


def prompt(ops: NativeOps, layer: Layer, *cuts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A request's results and state, computed in chunks that end at the cuts and at its end."""
    state, outs, begin = layer.state(), [], 0
    for end in (*cuts, len(next(iter(layer.rows.values())))):
        step = tables([(end - begin, end, 3)])
        outs.append(run(ops, layer.tokens(begin, end), state, step))
        begin = end
    return torch.cat(outs), state[3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_no_bit_depends_on_how_a_prompt_is_cut(ops, name, dtype):
    layer = LAYERS[name](Draw(dtype), 70)
    whole = alone(ops, layer)
    for cuts in ((1,), (2,), (3, 4, 5), (64,), (69,), (17, 33, 34), tuple(range(1, 70))):
        cut = prompt(ops, layer, *cuts)
        assert same(cut[0], whole[0]) and same(cut[1], whole[1]), cuts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_no_bit_depends_on_other_requests_or_on_threads(ops, name, dtype):
    """A mixed step: a new prompt, a decode, a later chunk, padding and an empty request."""
    draw = Draw(dtype)
    every = [LAYERS[name](draw, tokens) for tokens in (41, 9, 30)]
    prompts = [replace(each, weights=every[0].weights) for each in every]
    pasts = 0, 8, 17
    expected = [alone(ops, each) for each in prompts]
    step = [each.tokens(past) for each, past in zip(prompts, pasts, strict=True)]
    unread = LAYERS[name](draw, 2)  # rows of a request of padding
    layer = concatenated([step[0], unread, *step[1:]], padding=3)
    counts = [41, 2, 1, 13]
    lengths, slots = [41, 0, 9, 30], [5, 0, 2, 6]
    every_request = [*zip(counts, lengths, slots, strict=True), (0, 4, 4), (0, 0, 0)]
    for number in (1, 2):
        state = layer.state()
        for slot, each, past in zip((2, 6), prompts[1:], pasts[1:], strict=True):
            run(ops, each.tokens(0, past), state, tables([(past, past, slot)]))
        untouched = state.clone()
        with threads(number):
            out = run(ops, layer, state, tables(every_request))
        split = out.split([*counts, 3])
        for got, (whole, _), past in zip((split[0], *split[2:4]), expected, pasts, strict=True):
            assert same(got, whole[past:])
        for slot, (_, final) in zip((5, 2, 6), expected, strict=True):
            assert same(state[slot], final)
        for slot in (0, 1, 3, 4):
            assert same(state[slot], untouched[slot])
        assert not split[1].any() and not split[4].any()


@pytest.mark.parametrize("name", LAYERS)
def test_nan_in_a_neighbour_reaches_nobody_else(ops, name):
    layer = LAYERS[name](Draw(torch.bfloat16), 12)
    expected, final = alone(ops, layer)
    bad = replace(layer, rows={n: torch.full_like(x, torch.nan) for n, x in layer.rows.items()})
    state = layer.state(0.5)
    state[0] = torch.nan
    step = tables([(12, 12, 1), (12, 12, 3), (12, 20, 2)])
    first, own, last = run(ops, concatenated([bad, layer, bad]), state, step).split(12)
    assert same(own, expected) and same(state[3], final)
    assert first.isnan().all() and last.isnan().all()


@pytest.mark.parametrize("name", LAYERS)
def test_the_null_slot_is_neither_read_nor_written(ops, name):
    layer = LAYERS[name](Draw(torch.float32), 6)
    state = layer.state()
    before = state.clone()
    out = run(ops, layer, state, tables([(6, 9, 0)]))
    assert same(out, alone(ops, layer)[0]) and same(state, before)


@pytest.mark.parametrize("name", LAYERS)
def test_steps_of_padding_alone_return_zeros(ops, name):
    layer = LAYERS[name](Draw(torch.float32), 4)
    state = layer.state()
    for step in (tables([(0, 0, 0)]), [torch.zeros(n, dtype=torch.int32) for n in (0, 0, 1)]):
        assert not run(ops, layer, state, step).any()
    nothing = run(ops, layer.tokens(0, 0), state, tables([(0, 0, 0)]))
    assert nothing.shape[0] == 0 and state.isnan().all()


@pytest.mark.parametrize("heads", [1, 2, 8])
def test_heads_that_share_keys_are_like_heads_with_copies(ops, heads):
    """Value head ``h`` uses key head ``h // (Hv // Hk)``, and groups of B and C the same."""
    layer = delta(Draw(torch.float32), 20, heads, 8, 16, 16)
    wide = dict(layer.rows)
    for name in ("q", "k"):
        wide[name] = wide[name].repeat_interleave(8 // heads, 1)
    assert same(alone(ops, layer)[0], alone(ops, replace(layer, rows=wide))[0])
    layer = ssd(Draw(torch.float32), 20, 8, 8, heads, 16)
    wide = dict(layer.rows)
    for name in ("B", "C"):
        wide[name] = wide[name].repeat_interleave(8 // heads, 1)
    assert same(alone(ops, layer)[0], alone(ops, replace(layer, rows=wide))[0])


def test_a_decay_by_head_is_one_by_channel_that_is_equal_for_all(ops):
    layer = delta(Draw(torch.bfloat16), 20, 2, 2, 24, 80)
    g = layer.rows["g"].unsqueeze(2).expand(-1, -1, 24).contiguous()
    by_channel = replace(layer, rows=layer.rows | {"g": g})
    assert same(alone(ops, layer)[0], alone(ops, by_channel)[0])


def test_a_scan_of_one_a_per_head_is_ssd(ops):
    """Mamba 1 with the same decay in all channels of a head."""
    layer = ssd(Draw(torch.float32), 20, 1, 12, 1, 16)
    rows = {name: each.squeeze(1) for name, each in layer.rows.items() if name != "dt"}
    rows["dt"] = layer.rows["dt"].expand(-1, 12).contiguous()
    weights = {"A": layer.weights["A"].view(1, 1).expand(12, 16).contiguous(),
               "D": layer.weights["D"].expand(12).contiguous()}  # fmt: skip
    order = ("x", "dt", "A", "B", "C", "D")
    same_layer = Layer("state_scan_", rows, weights, (12, 16), torch.float32, order)
    torch.testing.assert_close(alone(ops, same_layer)[0], alone(ops, layer)[0].squeeze(1))


Spoil = Callable[[dict[str, Any]], None]


def put(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Spoil:
    def spoil(given: dict[str, Any]) -> None:
        given[name] = change(given[name])

    return spoil


def number(name: str, at: int, value: int) -> Spoil:
    def spoil(given: dict[str, Any]) -> None:
        given[name][at] = value

    return spoil


TABLES = ("slots", "seq_lens", "query_start_loc")
OF_ALL: dict[str, tuple[Spoil, str]] = {
    "slots of int64": (put("slots", torch.Tensor.long), "slots"),
    "lengths of int64": (put("seq_lens", torch.Tensor.long), "seq_lens"),
    "starts of float32": (put("query_start_loc", torch.Tensor.float), "query_start_loc"),
    "too few lengths": (put("seq_lens", lambda x: x[:-1]), "seq_lens"),
    "too few starts": (put("query_start_loc", lambda x: x[:-1]), "query_start_loc"),
    "a slot outside": (number("slots", 1, 7), r"slots\[1\] in 0..6, got 7"),
    "a negative slot": (number("slots", 0, -1), r"slots\[0\] in 0..6, got -1"),
    "too many rows": (number("query_start_loc", 2, 9), "rows of request 1 in 0..8, in order"),
    "a decreasing start": (number("query_start_loc", 1, 9), "rows of request 0 in 0..8, in order"),
    "a negative length": (number("seq_lens", 0, -4), r"seq_lens\[0\] of 0 or at least its 3 rows"),
    "fewer tokens than rows": (number("seq_lens", 0, 2), r"seq_lens\[0\] of 0 or at least its 3"),
    "a state of other shape": (put("state", lambda x: x[:, :-1].contiguous()), "state"),
    "a state of float16": (put("state", torch.Tensor.half), "state"),
    "a state that is not dense": (put("state", lambda x: x[::2]), "state"),
}
OF_ONE: dict[str, dict[str, tuple[Spoil, str]]] = {
    "conv of 3 taps": {
        "another dtype of weights": (put("weight", torch.Tensor.bfloat16), "weight"),
        "another dtype of the bias": (put("bias", torch.Tensor.bfloat16), "bias"),
        "a channel too few": (put("weight", lambda x: x[1:].contiguous()), "weight"),
        "no taps": (put("weight", lambda x: x[:, :0]), "weight"),
        "integers": (put("x", torch.Tensor.int), "x"),
        "another rank": (put("x", lambda x: x[None]), "x"),
    },
    "delta": {
        "integers": (put("v", torch.Tensor.int), "v"),
        "heads that do not divide": (
            lambda given: given.update({n: given[n][:, :1].expand(-1, 3, -1) for n in "qk"}),
            "q and k",
        ),
        "keys unlike queries": (put("k", lambda x: x[:, :, 1:]), "k"),
        "values of other tokens": (put("v", lambda x: x[1:]), "v"),
        "a decay too few": (put("g", lambda x: x[:, 1:]), "g"),
        "beta for channels": (put("beta", lambda x: x[..., None]), "beta"),
    },
    "ssd": {
        "steps of bfloat16": (put("dt", torch.Tensor.bfloat16), "dt"),
        "groups that do not divide": (
            lambda given: given.update({n: given[n][:, :1].expand(-1, 3, -1) for n in "BC"}),
            "B and C",
        ),
        "C unlike B": (put("C", lambda x: x[:, :, 1:]), "C"),
        "a decay too few": (put("A", lambda x: x[1:]), "A"),
        "D of other heads": (put("D", lambda x: x[1:]), "D"),
    },
    "scan": {
        "steps of bfloat16": (put("dt", torch.Tensor.bfloat16), "dt"),
        "steps by head": (put("dt", lambda x: x[:, :1]), "dt"),
        "B of other sizes": (put("B", lambda x: x[:, 1:]), "B"),
        "a channel too few": (put("A", lambda x: x[1:]), "A"),
        "D of other channels": (put("D", lambda x: x[1:]), "D"),
    },
}
BAD = [
    *((layer, name, *case) for layer in OF_ONE for name, case in OF_ALL.items()),
    *((layer, name, *case) for layer, all_ in OF_ONE.items() for name, case in all_.items()),
]


@pytest.mark.parametrize(("layer", "spoil", "about"), [(a, c, d) for a, _, c, d in BAD],
                         ids=[f"{a}-{b}" for a, b, _, _ in BAD])  # fmt: skip
def test_a_bad_call_says_what_was_expected_and_what_came(ops, layer, spoil, about):
    made = LAYERS[layer](Draw(torch.float32), 8)
    step = tables([(3, 3, 2), (5, 5, 4)])
    names = (*made.order, "state", *TABLES)
    given = dict(zip(names, made.arguments(made.state(), step), strict=False))
    spoil(given)
    op = getattr(getattr(torch.ops, ops.namespace), made.op)
    with pytest.raises((KernelArgumentError, RuntimeError)) as caught:
        op(*given.values(), *made.options)
    text = str(caught.value)
    assert text.startswith(f"{made.op}: expected ") and re.search(about, text), text
    assert ", got " in text and ": " in text.partition(", got ")[2]


def test_states_that_share_memory_with_an_input_are_refused(ops):
    layer = scan(Draw(torch.float32), 7, 8, 4)
    state = layer.state(0.0)
    shared = replace(layer, rows=layer.rows | {"B": state.flatten()[: 7 * 4].view(7, 4)})
    with pytest.raises(KernelArgumentError, match="B apart from state"):
        run(ops, shared, state, tables([(7, 7, 1)]))
