"""The last layer computes only the rows that need logits, and writes the keys of all."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
import torch
from functorch.compile import make_boxed_func
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from compiled_attn import BatchBuilder, Request
from compiled_attn.models.hf import PagedCausalLM, cache_for
from compiled_attn.step import PartsLayout, TableLayout
from tests.compiled_attn.models.hf.families import small_model
from tests.compiled_attn.tiny import tiny_model

BLOCKS, SIZE, WIDTH = 24, 4, 6
TABLES = ([3, 9, 4, 8, 21, 20], [7, 6, 5, 1, 2, 10], [11, 12, 13, 14, 15, 16])
LENGTH = WIDTH * SIZE


def paged(model, layout=None, dtype=None) -> PagedCausalLM:
    cache = cache_for(model, BLOCKS, SIZE, dtype=dtype)
    return PagedCausalLM(model, cache, layout or TableLayout(BLOCKS, SIZE, WIDTH))


def run(module: PagedCausalLM, requests: list[Request], extra: int = 0) -> torch.Tensor:
    """Logits of a step, padded by some tokens and requests, with the last layer cut as compiled."""
    plan = module.layout.plan(BatchBuilder(BLOCKS, SIZE).rows_of(requests))
    bucket = {axis: size + extra for axis, size in plan.need.items()}
    module._in_trial = True
    with torch.no_grad():
        return module(*plan.fill(bucket))[: sum(each.num_logits for each in requests)]


def linears(module: PagedCausalLM, requests: list[Request]) -> Counter[int]:
    """Number of linear layers in the compiled graph of a step, by their number of rows."""
    rows: Counter[int] = Counter()

    def count(graph: torch.fx.GraphModule, _: object) -> object:
        for node in graph.graph.nodes:
            if node.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                rows[node.meta["val"].shape[0]] += 1
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    step = module.layout.plan(BatchBuilder(BLOCKS, SIZE).rows_of(requests)).fill()
    with torch.no_grad():
        torch.compile(module, backend=aot_autograd(fw_compiler=count), dynamic=False)(*step)
    return rows


def whole(module: PagedCausalLM) -> PagedCausalLM:
    """The same module with a last layer that computes all rows."""
    module._cuts_last_layer = False
    return module


@st.composite
def steps(draw):
    """Two steps of up to three texts, some of whose last rows need logits."""
    texts = draw(st.lists(st.integers(2, LENGTH), min_size=1, max_size=3))
    made = []
    cuts = [draw(st.integers(1, length - 1)) for length in texts]
    for spans in ([(0, cut) for cut in cuts], [*zip(cuts, texts, strict=True)]):
        counts = [draw(st.integers(0, min(3, end - begin))) for begin, end in spans]
        made.append([*zip(spans, counts, strict=True)])
    return made, draw(st.integers(0, 3))


@pytest.fixture(scope="module")
def llama():
    model = tiny_model()
    model.set_attn_implementation("eager")
    text = torch.randint(3, 90, (3, LENGTH), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        return text, model(text).logits, paged(model)


@given(steps())
def test_rows_have_the_logits_of_the_model_by_itself(ops, llama, made):
    text, expected, module = llama
    parts, extra = made
    for buffer in module.cache.buffers():
        buffer.fill_(torch.nan)[:SIZE] = 0
    for step in parts:
        requests, rows = [], []
        for i, ((begin, end), count) in enumerate(step):
            tokens = text[i, begin:end].tolist()
            requests.append(Request(tokens, begin, TABLES[i], num_logits=count))
            rows.append(expected[i, end - count : end])
        logits = run(module, requests, extra)
        torch.testing.assert_close(logits, torch.cat(rows), atol=2e-5, rtol=2e-5)


@given(steps())
def test_rows_read_what_their_tokens_see(made):
    for step in made[0]:
        requests = [
            Request([1] * (end - begin), begin, TABLES[i], num_logits=count)
            for i, ((begin, end), count) in enumerate(step)
        ]
        plan = BatchBuilder(BLOCKS, SIZE).plan_tables(requests)
        batch = plan.fill({axis: size + made[1] for axis, size in plan.need.items()}, WIDTH)
        few = batch.logits_metadata(SIZE)
        seen = [
            (end - count + n + 1, TABLES[i][: -(-end // SIZE)])
            for i, ((_, end), count) in enumerate(step)
            for n in range(count)
        ]
        for row, (length, table) in enumerate(seen):
            assert few.seq_lens[row] == length
            assert few.block_tables[row, : len(table)].tolist() == table
        assert few.seq_lens[max(len(seen), 1) :].eq(0).all()
        assert few.query_start_loc.tolist() == [*range(len(batch.logits_index) + 1)]
        assert few.slot_mapping.eq(0).all() and few.positions[: len(seen)].tolist() == [
            length - 1 for length, _ in seen
        ]


def test_a_step_of_padding_alone_sees_nothing():
    padding = TableLayout(8, 4, 2).padding({"tokens": 6, "requests": 3})
    assert padding.logits_metadata(4).seq_lens.eq(0).all()


@pytest.mark.parametrize("dtype", [None, torch.int8])
def test_a_cut_layer_writes_all_keys(ops, dtype):
    request = [Request([*range(5, 15)], 0, TABLES[0])]
    cut, uncut = paged(tiny_model(), dtype=dtype), whole(paged(tiny_model(), dtype=dtype))
    torch.testing.assert_close(run(cut, request), run(uncut, request), atol=2e-5, rtol=2e-5)
    for (name, mine), theirs in zip(cut.cache.named_buffers(), uncut.cache.buffers(), strict=True):
        assert torch.equal(mine[SIZE:], theirs[SIZE:]), name  # but for the null block


def test_a_compiler_eliminates_what_the_first_run_does_not_write(ops):
    requests = [Request([*range(5, 15)], 0, TABLES[0])]
    # Two layers of q, k, v, o, gate, up and down; the head has one row. Of the last layer only the
    # keys and values of all rows are left.
    assert linears(paged(tiny_model()), requests) == {10: 7 + 2, 1: 7 + 1}
    assert linears(whole(paged(tiny_model())), requests) == {10: 2 * 7, 1: 1}


def test_a_decode_runs_the_last_layer_once(ops):
    requests = [Request([5], 0, TABLES[0]), Request([6], 0, TABLES[1])]
    assert linears(paged(tiny_model()), requests) == {2: 2 * 7 + 1}


def test_a_graph_of_symbolic_sizes_writes_all_keys_and_computes_few_rows(ops):
    torch._dynamo.reset()
    module, eager = paged(tiny_model()), whole(paged(tiny_model()))
    step = torch.compile(module, backend="eager", fullgraph=True, dynamic=True)
    spans = [[(0, 10), (0, 5)], [(10, 17), (5, 6)], [(17, 18), (6, 7)]]
    for span in spans:
        requests = [Request([*range(5 + a, 5 + b)], a, TABLES[i]) for i, (a, b) in enumerate(span)]
        plan = module.layout.plan(BatchBuilder(BLOCKS, SIZE).rows_of(requests))
        batch = plan.fill({"tokens": plan.need["tokens"] + 2, "requests": 3})
        with torch.no_grad():
            torch.testing.assert_close(step(*batch)[:2], eager(*batch)[:2], atol=2e-5, rtol=2e-5)
        for mine, theirs in zip(module.cache.buffers(), eager.cache.buffers(), strict=True):
            torch.testing.assert_close(mine[SIZE:], theirs[SIZE:], atol=2e-5, rtol=2e-5)


def test_a_tower_of_as_many_layers_is_not_taken_for_the_decoder(ops):
    model = small_model("gemma3")
    module = paged(model)
    assert module._cuts_last_layer
    assert all("language_model" in name for name in names_of(model, module._layers))


def names_of(model: nn.Module, modules: list[nn.Module]) -> list[str]:
    return [name for name, module in model.named_modules() if any(module is m for m in modules)]


@pytest.mark.parametrize("family", ["deepseek_v3", "mistral", "nemotron", "gpt_oss"])
def test_latents_windows_sinks_and_carried_steps_are_cut_too(ops, family):
    text = [*range(5, 27)]
    model = small_model(family)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(torch.tensor([text])).logits[0, -1:]
    module = paged(model)
    assert module._cuts_last_layer
    logits = run(module, [Request(text, 0, TABLES[0])])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", PartsLayout(BLOCKS, SIZE)),  # which row is whose is not known
        ("gemma4_text", TableLayout(BLOCKS, SIZE, WIDTH)),  # layers share keys
        ("gpt2", TableLayout(BLOCKS, SIZE, WIDTH)),  # reshapes its states like its input
    ],
)
def test_other_models_compute_all_rows(ops, family, layout):
    assert not paged(small_model(family), layout)._cuts_last_layer


class WithEmbeddings(nn.Module):
    """Replaces the norm, and adds the embedding of its token to every row."""

    def __init__(self, norm: nn.Module, embedding: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        embedding.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, given: object, embedded: torch.Tensor) -> None:
        self.embedded = embedded

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.norm(states + self.embedded)


def test_a_model_that_needs_all_rows_after_its_layers_computes_them(ops, caplog):
    model, text = tiny_model(), [*range(5, 15)]
    model.model.norm = WithEmbeddings(model.model.norm, model.model.embed_tokens)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(torch.tensor([text])).logits[0, -1:]
    with caplog.at_level(logging.INFO, "compiled_attn"):
        module = paged(model)
    assert "the last layer computes all rows: " in caplog.text
    logits = run(module, [Request(text, 0, TABLES[0])])
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=2e-5)
