"""Models with states compute a step as they compute each text alone, and wrong states are found."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from compiled_attn.cache.state_cache import StateCache
from compiled_attn.models.hf import ModelRefused, PagedCausalLM, cache_for
from compiled_attn.models.hf.attention import PagedStep
from compiled_attn.models.hf.states import calls
from compiled_attn.step import BatchBuilder, PartsLayout, Request, TableLayout
from graphs.store.values import describe
from tests.compiled_attn.models.hf.families import small_model
from tests.slow import slow_but

pytestmark = pytest.mark.usefixtures("ops", "without_gradients")

BLOCKS, SIZE, WIDTH, SLOTS = 16, 4, 6, 5
TEXTS = [[(7 * i * i + 3 * i + seed) % 120 + 3 for i in range(n)] for seed, n in ((5, 19), (6, 9))]
TEXTS.append([*TEXTS[0][:6], 9, 8, 7])
KINDS = ("lfm2", "qwen3_next", "mamba2", "mamba")
FAMILIES = (
    *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba"),
    *("kimi_linear", "lara_mini", "lfm2_moe", "lfm3", "nemotron_h", "olmo_hybrid", "qwen3_5"),
    *("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "zamba2", *KINDS),
)


def paged(model) -> PagedCausalLM:
    cache = cache_for(model, BLOCKS, SIZE, state_slots=SLOTS)
    layout = TableLayout(BLOCKS, SIZE, WIDTH, has_states=True)
    return PagedCausalLM(model, cache, layout)


def expected_of(model):
    """Logits of each text, by the model without a cache."""
    return [model(input_ids=torch.tensor([text]), use_cache=False).logits[0] for text in TEXTS]


def schedule(seed=0):
    """Steps of ``(text, start, end)``: prompts in chunks, beside single tokens, in any order."""
    chance, done = random.Random(seed), [0] * len(TEXTS)
    while any(at < len(text) for at, text in zip(done, TEXTS, strict=True)):
        step = []
        for number, text in enumerate(TEXTS):
            start = done[number]
            end = min(len(text), start + chance.choice([0, 1, 1, 2, 5]))
            if end > start:
                step.append((number, start, end))
                done[number] = end
        if step:
            chance.shuffle(step)
            yield step


def run(module, call, seed=0):
    """Calls ``call`` with each step of a schedule; yields its logits and rows of the texts."""
    module.cache.states.fill_(math.nan)
    tables, slots = ([3, 9, 1, 12, 7], [8, 2, 4], [5, 6, 11]), (4, 1, 3)
    for step in schedule(seed):
        requests = [
            Request(TEXTS[n][a:b], a, tables[n], num_logits=b - a, state_slot=slots[n])
            for n, a, b in step
        ]
        plan = module.layout.plan(BatchBuilder(BLOCKS, SIZE).rows_of(requests))
        count = sum(b - a for _, a, b in step)
        bucket = {"tokens": count + 2, "requests": max(count, len(step)) + 1}
        yield call(*plan.fill(bucket))[:count], step


def distance(logits, expected) -> float:
    """The largest of a row, relative to its spread."""
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    return float(((logits - expected).norm(dim=-1) / spread).max())


def check(module, expected, call, seed=0):
    for logits, step in run(module, call, seed):
        assert distance(logits, torch.cat([expected[n][a:b] for n, a, b in step])) < 3e-5
    states = [*module.cache.states.buffers()]
    assert all(state[0].isnan().all() and state[2].isnan().all() for state in states)


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_decodes_and_mixed_steps_equal_the_model_without_a_cache(family):
    expected, module = expected_of(small_model(family)), paged(small_model(family))
    for seed in range(2):
        check(module, expected, module, seed)


def test_step_sizes_are_limited_in_decodes_as_in_prompts():
    # `generate` of transformers limits those of prompts only.
    settings = {"time_step_limit": (0.05, 0.06)}
    expected = expected_of(small_model("mamba2", **settings))
    assert not torch.allclose(expected[0], expected_of(small_model("mamba2"))[0], atol=1e-3)
    module = paged(small_model("mamba2", **settings))
    check(module, expected, module)


def test_layers_that_share_their_attention_have_keys_of_their_own():
    cache = paged(small_model("zamba2")).cache
    assert cache.num_layers == 2 and cache.key(0).data_ptr() != cache.key(1).data_ptr()


@pytest.mark.parametrize("family", KINDS)
def test_in_bfloat16_too(family):
    expected = expected_of(small_model(family).bfloat16())
    module = paged(small_model(family).bfloat16())
    kinds = {shape.kind: shape.dtype for shapes in module.cache.states.shapes for shape in shapes}
    assert kinds.pop("conv") == torch.bfloat16 and {*kinds.values()} <= {torch.float32}
    for logits, step in run(module, module):
        assert distance(logits, torch.cat([expected[n][a:b] for n, a, b in step])) < 0.1


@pytest.mark.parametrize(
    "family", slow_but(("lfm2",), ("falcon_h1", "jamba", "mamba", "mamba2", "qwen3_next", "lfm2"))
)
@pytest.mark.parametrize("with_regions", [True, False])
def test_one_graph_of_symbolic_sizes_serves_all_steps(family, with_regions, fresh_compiler):
    expected, module = expected_of(small_model(family)), paged(small_model(family))
    counter = CompileCounterWithBackend("aot_eager")
    variant = module.capture_variants()[0 if with_regions else 1]
    graph = torch.compile(variant, backend=counter, fullgraph=True)

    def call(*step):
        for field in step:
            torch._dynamo.mark_dynamic(field, 0)
        return graph(*step)

    check(module, expected, call)
    assert counter.frame_count == 1


@pytest.mark.parametrize("family", KINDS)
def test_another_process_finds_its_graphs_and_the_model_is_not_seen_as_changed(family):
    modules = [paged(small_model(family)) for _ in range(2)]
    assert describe(modules[0]).digest == describe(modules[1]).digest
    modules[0].check_unchanged()
    again = paged(modules[0].model)  # with the forwards of an earlier engine
    assert describe(again).digest == describe(modules[1]).digest


@pytest.mark.parametrize("family", KINDS)
def test_a_served_model_still_generates_by_itself(family):
    ids, options = torch.tensor([TEXTS[1]]), {"max_new_tokens": 5, "do_sample": False}
    expected = small_model(family).generate(ids, **options)
    model = paged(small_model(family)).model
    model.set_attn_implementation("eager")
    assert torch.equal(model.generate(ids, **options), expected)


def test_a_last_layer_with_a_state_computes_all_rows():
    assert paged(small_model("lfm2"))._cuts_last_layer
    assert not paged(small_model("falcon_h1"))._cuts_last_layer


def test_layers_of_the_cache_are_those_that_attend_and_states_those_that_have_one():
    kinds = ["linear_attention", "full_attention"] * 2
    model = small_model("qwen3_next", num_hidden_layers=4, layer_types=kinds)
    cache = paged(model).cache
    assert cache.num_layers == 2
    assert [[shape.kind for shape in each] for each in cache.states.shapes] == [
        ["conv", "delta"], [], ["conv", "delta"], [],
    ]  # fmt: skip
    conv, delta = cache.states.shapes[0]
    # q and k of 2 heads of 16, v of 4 heads of 16; a convolution of 4.
    assert (conv.shape, delta.shape) == ((128, 3), (4, 16, 16))


def test_a_model_of_states_alone_has_a_cache_without_keys():
    cache = paged(small_model("mamba2")).cache
    assert cache.num_layers == 0 and len(cache.states.shapes) == 2


# Mistakes that a trial must find.

COUNT = itertools.count()


def states_of(change):
    plain = PagedStep.states_of

    def changed(step, place):
        states = plain(step, place)
        return states and change(states)

    return lambda patch: patch.setattr(PagedStep, "states_of", changed)


def lengths_of_the_step(states):
    lengths = states.query_start_loc.diff().int()
    return replace(states, seq_lens=lengths)


def reads_what_is_stale(states):
    return replace(states, seq_lens=states.seq_lens + 1)


def one_slot_for_all(states):
    return replace(states, slots=torch.ones_like(states.slots))


def slots_exchanged_at_times(states):
    flipped = states.slots.flip(0) if next(COUNT) % 3 == 0 else states.slots
    return replace(states, slots=flipped)


def states_that_are_not_stored(states):
    return replace(states, states=tuple(each.clone() for each in states.states))


def no_convolution_state(patch):
    plain = calls._conv

    def without(cache, number, *args, **kwargs):
        return plain(lengths_of_the_step(cache), number, *args, **kwargs)

    patch.setattr(calls, "_conv", without)


MISTAKES = (
    *map(states_of, (lengths_of_the_step, one_slot_for_all, states_that_are_not_stored)),
    *map(states_of, (reads_what_is_stale, slots_exchanged_at_times)),
    no_convolution_state,
)


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_with_states_is_found(mistake, family, monkeypatch):
    model = small_model(family)
    cache = cache_for(model, BLOCKS, SIZE)
    mistake(monkeypatch)
    with pytest.raises(ModelRefused, match="same logits through the paged cache"):
        PagedCausalLM(model, cache)
    assert not any("forward" in vars(module) for module in model.modules())
    monkeypatch.undo()
    PagedCausalLM(model, cache)


def test_a_cache_of_other_states_is_refused():
    cache = cache_for(small_model("lfm2"), BLOCKS, SIZE)
    other = cache_for(small_model("lfm2", conv_L_cache=5), BLOCKS, SIZE)
    with pytest.raises(ValueError, match="expected a cache with the states"):
        PagedCausalLM(small_model("lfm2"), other)
    assert isinstance(cache.states, StateCache)


def test_a_step_without_slots_is_refused():
    model = small_model("lfm2")
    with pytest.raises(ModelRefused, match="with states and steps without their slots"):
        PagedCausalLM(model, cache_for(model, BLOCKS, SIZE), PartsLayout(BLOCKS, SIZE))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("zaya", "with ZayaCCAProjection, which keeps a state by code of its own"),
        ("qwen4_exp_text", "with layers of type indexed_attention"),
        ("inkling_text", "with InklingAttention that also passes position_bias"),
        # Of transformers 5.24, and of 5.23.
        ("inkling2_text", "reads is_sliding of its cache|passes position_bias, sinks"),
        ("recurrent_gemma", "with layers of type linear_attention"),
        ("minimax", "with layers of type linear_attention"),
        ("rwkv", "attention code of its own"),
        ("xlstm", "whose layers never call it"),
    ],
)
def test_other_states_are_refused_by_name(family, reason):
    model = small_model(family)
    with pytest.raises(ModelRefused, match=reason):
        cache_for(model, BLOCKS, SIZE)


@pytest.mark.parametrize(
    ("family", "rank"), [("mamba", "time_step_rank"), ("jamba", "mamba_dt_rank")]
)
def test_weights_that_a_mixer_reads_itself_are_not_packed(family, rank):
    model = small_model(family, **{rank: 32})
    expected = expected_of(model)
    cache = cache_for(model, BLOCKS, SIZE, state_slots=SLOTS)
    layout = TableLayout(BLOCKS, SIZE, WIDTH, has_states=True)
    module = PagedCausalLM(
        model,
        cache,
        layout,
        lambda w: "packed" if w.shape[0] % 16 == w.shape[1] % 32 == 0 else None,
    )
    assert module.packed > 2
    check(module, expected, module)
