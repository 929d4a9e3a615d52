"""Small models of hybrid families through all of an engine: the tokens of `generate`."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel

from compiled_attn.bundle import Bundle, BundleExecutor, write_bundle
from compiled_attn.engine import ConfigError, Engine, EngineConfig, SamplingParams
from compiled_attn.errors import AdapterError
from compiled_attn.models.hf.states import rewrite
from compiled_attn.ops import load
from graphs.store.values import describe
from tests.compiled_attn.engine.small import greedy, plain, prompts_of, rest_of, small_engine
from tests.compiled_attn.models.adapters.lora import drawn, merged
from tests.compiled_attn.models.hf.families import small_model
from tests.compiled_attn.text.models import save_chat_model
from tests.slow import slow_but

pytestmark = pytest.mark.usefixtures("ops", "one_thread")

FAMILIES = ("lfm2", "mamba2", "mamba", "qwen3_next")
"""A convolution with attention, Mamba 2 and Mamba alone, a gated delta net with attention."""
NEW = 8
PROMPTS = prompts_of(6, seed=5, longest=40, vocab=120)
SIZES = {"context": 80, "num_blocks": 60}


@pytest.fixture
def one_thread():
    """The tensors are too small to be divided among threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def model_of(family: str) -> PreTrainedModel:
    # One layer of a kind is enough for a model that has no other.
    return small_model(family, **({"num_hidden_layers": 1} if family == "mamba" else {}))


def engine_of(family: str, **config) -> Engine:
    return small_engine(model_of(family), **{**SIZES, **config})


@pytest.fixture(scope="module")
def expected():
    """Tokens of `generate`, by family."""
    known: dict[str, list[list[int]]] = {}

    def tokens_of(family: str) -> list[list[int]]:
        if family not in known:
            known[family] = plain(model_of(family), PROMPTS, NEW)
        return known[family]

    return tokens_of


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_tokens_per_step": 5},
        {"num_blocks": 18},
        {"max_seqs": 2, "snapshot_every": 1, "state_memory": "1MB"},
        {"defrag_waste": 0.0, "sanitize": True, "num_blocks": 18},
        {"sanitize": True, "snapshot_every": 1, "state_memory": "1MB"},
    ],
    ids=lambda each: " ".join(each) or "plain",
)
@pytest.mark.parametrize("family", slow_but(("mamba2", "qwen3_next"), FAMILIES))
def test_tokens_are_those_of_generate(family, settings, expected):
    engine = engine_of(family, **settings)
    assert greedy(engine, PROMPTS, NEW) == expected(family)
    assert greedy(engine, PROMPTS, NEW) == expected(family)  # with snapshots
    report = engine.report()
    assert bool(report.states["restored"]) or "snapshot_every" not in settings
    assert bool(engine.scheduler.preemptions) or settings.get("num_blocks") != 18
    assert engine.restarts == engine.pool.num_used == 0


@pytest.mark.parametrize("family", slow_but((), ("lfm2", "mamba", "mamba2", "qwen3_5_text")))
def test_compiled_graphs_are_replayed_stored_and_bundled(family, expected, tmp_path):
    """Another process loads the graphs and compiles nothing; a bundle needs no model."""
    config = {
        **SIZES, "backend": "inductor", "store": str(tmp_path / "store"), "max_graphs": 2,
        "num_blocks": 18, "snapshot_every": 1, "state_memory": "1MB", "weights": "packed",
    }  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(save_chat_model(tmp_path / "chat"))
    engine = engine_of(family, **config)
    check_compiled(engine, expected(family))
    check_bystanders(engine, expected(family))
    write_bundle(engine.executor, tokenizer, tmp_path / "bundle", family)
    bundled = Engine(BundleExecutor(Bundle(tmp_path / "bundle")))
    bundled.warmup()
    check_compiled(bundled, expected(family))
    # Both of them fresh: keys have global variables, which other tests of this process change.
    config["store"] = str(tmp_path / "children")
    given = json.dumps({"family": family, "config": config, "prompts": PROMPTS})
    command = [sys.executable, "-m", "tests.compiled_attn.engine.test_hybrid_families", given]
    for _ in range(2):
        done = subprocess.run(
            command, cwd=Path(__file__).parents[3], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        tokens, loaded, graphs, compiles = json.loads(done.stdout.splitlines()[-1])
        assert tokens == expected(family)
    assert (loaded, compiles) == (graphs, 0) and graphs > 0, done.stderr


def check_compiled(engine: Engine, tokens: list[list[int]]) -> None:
    for _ in range(2):
        assert greedy(engine, PROMPTS, NEW) == tokens
    report = engine.report()
    assert report.replays == report.steps > 10
    assert (report.compiles_after_warmup, report.graph_breaks, report.fallbacks) == (0, 0, 0)
    assert report.states["restored"] and engine.scheduler.preemptions and not engine.restarts


def check_bystanders(engine: Engine, tokens: list[list[int]]) -> None:
    """NaN in null and free slots moves no bit of a request, nor NaN in those of others its tokens.

    A request with NaN ends, so that the next steps have fewer rows.
    """
    states, pool, salts = engine.executor.cache.states, engine.pool.states, iter("abc")

    def run(poisoned: Callable[[int | None], set[int]]) -> list[object]:
        salt = next(salts)  # for equal chunks
        params = SamplingParams(max_new_tokens=NEW, logprobs=0)
        first = engine.submit(PROMPTS[0], params, salt=salt)
        engine.submit(PROMPTS[3], SamplingParams(max_new_tokens=NEW), salt=salt)
        found = []
        while engine.has_work:
            states.fill_(math.nan, sorted(poisoned(pool._slot_of.get(first))))
            found += [event for event in engine.step() if event.request_id == first]
        assert [event.token for event in found] == tokens[0]
        return [event.logprobs for event in found]

    clean = run(lambda own: set())
    assert run(lambda own: {0, *pool.free}) == clean and clean[0] is not None
    run(lambda own: {0, *pool.free, *pool._slot_of.values()} - {own})


def test_a_changed_rewriting_has_other_keys(monkeypatch):
    """Of the store, as the code of rewritten forwards is part of what a graph depends on."""
    before = describe(engine_of("mamba").executor.module).digest
    assert describe(engine_of("mamba").executor.module).digest == before
    plain_strip = rewrite._strip

    def changed(definition):
        plain_strip(definition)
        definition.body.insert(0, rewrite.ast.parse("_ = 1").body[0])

    monkeypatch.setattr(rewrite, "_strip", changed)
    rewrite.rewrite.cache_clear()
    try:
        assert describe(engine_of("mamba").executor.module).digest != before
    finally:
        rewrite.rewrite.cache_clear()


@pytest.mark.parametrize("family", FAMILIES)
def test_states_of_another_request_are_found_before_a_step(family, expected):
    engine = engine_of(family, max_seqs=2, sanitize=True)
    ids = [engine.submit(text, SamplingParams(max_new_tokens=NEW)) for text in PROMPTS[:2]]
    tokens = {each: [] for each in ids}
    while not all(tokens.values()):
        for event in engine.step():
            tokens[event.request_id].append(event.token)
    slots = engine.memory._tables._rows.state_slots
    slots[:2] = slots[[1, 0]]
    with pytest.raises(RuntimeError, match="expected row 0 to continue from"):
        engine.step()
    for each, rest in rest_of(engine).items():
        tokens[each] += rest
    assert [*tokens.values()] == expected(family)[:2] and engine.restarts == 1


def test_a_sanitizer_poisons_slots_without_states():
    engine = engine_of("mamba2", sanitize=True, state_memory=0)
    greedy(engine, PROMPTS, NEW)
    engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=NEW))
    engine.step()
    (own,) = engine.pool.states._slot_of.values()
    for state in engine.executor.cache.states.buffers():
        is_nan = state.flatten(1).isnan()
        assert not is_nan[own].any() and is_nan[[n for n in range(len(state)) if n != own]].all()
    rest_of(engine)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("lfm2", ("q_proj", "v_proj", "in_proj", "out_proj", "w1")),
        ("mamba2", ("in_proj", "out_proj")),
        ("mamba", ("in_proj", "x_proj", "out_proj")),
        ("qwen3_next", ("q_proj", "in_proj_qkvz", "in_proj_ba", "out_proj")),
    ],
)
def test_adapters_give_the_tokens_of_merged_weights(family, targets):
    model = model_of(family)
    adapters = [None, *(drawn(model, seed, targets=targets) for seed in range(2))]
    wanted = [plain(merged(model, each), PROMPTS[:3], NEW) for each in adapters]
    assert wanted[0] != wanted[1] != wanted[2]
    engine = engine_of(family, max_adapters=2, num_blocks=40)
    for number, adapter in enumerate(adapters[1:]):
        engine.adapters.add(str(number), adapter)
    names = [None, "0", "1"]
    texts = [text for _ in names for text in PROMPTS[:3]]
    params = [SamplingParams(max_new_tokens=NEW, adapter=name) for name in names for _ in range(3)]
    results = [each.tokens for each in engine.generate(texts, params, in_order=True)]
    assert results == [tokens for each in wanted for tokens in each]


def test_an_adapter_of_a_weight_that_a_mixer_reads_itself_is_refused():
    model = model_of("mamba")
    engine = engine_of("mamba", max_adapters=1)
    with pytest.raises(AdapterError, match="dt_proj, which gets no adapters, as it is not comp"):
        engine.adapters.add("one", drawn(model, 1, targets=("dt_proj",)))


@pytest.mark.parametrize("settings", [{"weights": "int8"}, {"weights": "int4"}])
@pytest.mark.parametrize("family", slow_but(("lfm2",), FAMILIES))
def test_quantised_weights_are_those_of_the_model_itself(family, settings):
    engine = engine_of(family, **settings)
    model = engine.executor.module.model
    is_few = sum(isinstance(each, nn.Linear) for each in model.modules()) < 3
    assert engine.executor.module.quantised or is_few
    assert greedy(engine, PROMPTS, NEW) == plain(model, PROMPTS, NEW)


def test_each_continuation_of_a_prompt_and_those_after_an_abort_are_right(expected):
    engine = engine_of("qwen3_next")
    tokens: dict[int, list[int]] = {}
    for event in engine.stream([PROMPTS[3]], SamplingParams(max_new_tokens=NEW, n=3)):
        tokens.setdefault(event.choice, []).append(event.token)
    assert [*tokens.values()] == [expected("qwen3_next")[3]] * 3
    ids = [engine.submit(text, SamplingParams(max_new_tokens=NEW)) for text in PROMPTS]
    engine.step()
    for each in ids[::2]:
        engine.abort(each)
    rest_of(engine)
    assert greedy(engine, PROMPTS, NEW) == expected("qwen3_next")
    assert engine.pool.num_used == 0


def test_a_model_without_positions_needs_a_context():
    with pytest.raises(ConfigError, match=r"expected a context.*--context"):
        Engine(model_of("mamba2"), EngineConfig(backend="eager"))


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.INFO)  # says what differs in a key
    load(strict=True)  # as the fixture does
    torch.set_num_threads(1)
    served = engine_of(given["family"], **given["config"])
    result = greedy(served, given["prompts"], NEW)
    totals = served.report()
    print(json.dumps([result, totals.graphs_loaded, totals.graphs, totals.compiles_after_warmup]))
