"""Many adapters over one set of graphs: tokens of merged weights, and nobody harms a neighbour."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

from compiled_attn.engine import (
    AsyncEngine,
    ConfigError,
    Engine,
    EngineConfig,
    RequestHandle,
    SamplingParams,
    cache_size,
)  # fmt: skip
from compiled_attn.engine.adapters import with_adapters
from compiled_attn.errors import AdapterError
from compiled_attn.models.adapters import Adapter, AdapterPool, LoraWeight, bytes_of_slots
from tests.compiled_attn.engine.small import SIZES, prompts_of, small_engine
from tests.compiled_attn.models.adapters.lora import drawn, merged, saved, settings, tensors
from tests.compiled_attn.models.hf.families import small_model
from tests.compiled_attn.tiny import plain_generate, tiny_model

NEW = 6
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def sampling(name: str | None, **others: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=NEW, ignore_eos=True, adapter=name, **others)


def served(engine: Engine, prompts: list[list[int]], names: list[str | None]) -> list[list[int]]:
    """Tokens of each prompt with each adapter, all in one batch."""
    pairs = [(prompt, sampling(name)) for prompt in prompts for name in names]
    results = engine.generate(*zip(*pairs, strict=True), in_order=True)
    return [result.tokens for result in results]


def expected(model, prompts: list[list[int]], adapters: list[Adapter | None]) -> list[list[int]]:
    """The same one by one, by `generate` of a model with merged weights."""
    whole = [merged(model, adapter) for adapter in adapters]
    return [plain_generate(each, prompt, NEW) for prompt in prompts for each in whole]


def of_q(a: torch.Tensor, b: torch.Tensor) -> Adapter:
    """An adapter of one layer."""
    return Adapter("mine", {"model.layers.0.self_attn.q_proj": LoraWeight(a, b, 1.0)})


@pytest.mark.parametrize("kernel", ["auto", "portable"])
@pytest.mark.parametrize("targets", [ALL, ("q_proj", "v_proj")], ids=["all", "q and v"])
def test_adapters_of_one_batch_give_the_tokens_of_merged_weights(kernel, targets):
    """Of several ranks, with chunks, shared prefixes, preemption, and requests without one."""
    model, prompts = tiny_model(), prompts_of(4, longest=40)
    adapters = [drawn(model, seed, rank=1 + 3 * seed, targets=targets) for seed in range(4)]
    wanted = expected(model, prompts, [None, *adapters])
    assert len({tuple(each) for each in wanted}) > 15
    engine = small_engine(tiny_model(), kernel=kernel, num_blocks=14, context=48, max_adapters=4)
    for number, adapter in enumerate(adapters):
        engine.adapters.add(str(number), adapter)
    assert served(engine, prompts, [None, "0", "1", "2", "3"]) == wanted
    assert engine.scheduler.preemptions


@pytest.mark.parametrize("family", ["gpt2", "deepseek_v3", "mixtral", "gemma3_text", "phi3"])
def test_adapters_of_other_families_give_the_tokens_of_merged_weights(family):
    """Transposed weights, latents, experts, windows, fused layers."""
    model, prompts = small_model(family), prompts_of(3, longest=20, vocab=100)
    engine = small_engine(small_model(family), max_adapters=2, context=64)
    layers = engine.executor.adapters.layers
    adapters = [
        Adapter(
            "drawn",
            {
                name: LoraWeight(
                    0.2 * torch.randn(4, each.in_features),
                    0.2 * torch.randn(each.out_features, 4),
                    1.5,
                )
                for name, each in layers.items()
            },
        )
        for _ in range(2)
    ]
    for number, adapter in enumerate(adapters):
        engine.adapters.add(str(number), adapter)
    wanted = expected(model, prompts, [None, *adapters])
    assert served(engine, prompts, [None, "0", "1"]) == wanted
    assert len({tuple(each) for each in wanted}) >= 3


def test_requests_without_an_adapter_have_the_tokens_of_an_engine_without_any():
    model, prompts = tiny_model(), prompts_of(6)
    asked = SamplingParams(max_new_tokens=NEW, temperature=0.7, seed=5)
    plain = [*small_engine(tiny_model()).generate(prompts, asked, in_order=True)]
    engine = small_engine(tiny_model(), max_adapters=2)
    engine.adapters.add("one", drawn(model, 1))
    mixed = [prompt for prompt in prompts for _ in range(2)]
    samplings = [asked, sampling("one")] * len(prompts)
    results = [*engine.generate(mixed, samplings, in_order=True)][::2]
    assert [each.tokens for each in results] == [each.tokens for each in plain]


def test_a_prefix_is_shared_by_requests_of_one_adapter_only():
    model, prompt = tiny_model(), [*range(1, 34)]
    engine = small_engine(tiny_model(), max_adapters=2)
    engine.adapters.add("one", drawn(model, 1))
    engine.adapters.add("two", drawn(model, 2))

    def cached(name: str | None, salt: str | None = None) -> int:
        (result,) = engine.generate([prompt], sampling(name), salt=salt)
        return result.cached_tokens

    for name in (None, "one", "two"):
        assert [cached(name), cached(name)] == [0, 32]
        assert [cached(name, "tenant"), cached(name, "tenant")] == [0, 32]
    engine.adapters.remove("one")
    engine.adapters.add("one", drawn(model, 3))
    assert cached("one") == 0  # not the keys of the earlier one


def test_adapters_come_and_go_while_others_are_served():
    model, prompts = tiny_model(), prompts_of(8, longest=30)
    first, second, third = (drawn(model, seed) for seed in (1, 2, 3))
    engine = small_engine(tiny_model(), max_adapters=2)
    engine.adapters.add("first", first)
    engine.adapters.add("second", second)
    names = [None, "first", "second", None] * 2
    ids = [engine.submit(p, sampling(name)) for p, name in zip(prompts, names, strict=True)]
    results = {}

    def step() -> None:
        for event in engine.step():
            if event.result is not None:
                results[event.request_id] = event.result.tokens

    step()
    engine.adapters.remove("first")
    assert engine.adapters.names == ["second"]
    with pytest.raises(AdapterError, match="1 that requests still use"):
        engine.adapters.add("third", third)
    with pytest.raises(ConfigError, match=r"name of an adapter \(second\), got 'first'"):
        engine.submit(prompts[0], sampling("first"))
    while engine.has_work:
        step()
        if not results.keys().isdisjoint({ids[1]}) and ids[5] in results and third is not None:
            engine.adapters.add("third", third)
            ids.append(engine.submit(prompts[0], sampling("third")))
            third = None
    merged_ones = [None, first, second, None] * 2
    wanted = [expected(model, [prompt], [adapter])[0]
              for prompt, adapter in zip(prompts, merged_ones, strict=True)]  # fmt: skip
    assert [results[each] for each in ids[:8]] == wanted
    assert results[ids[8]] == expected(model, prompts[:1], [drawn(model, 3)])[0]
    assert engine.report().compiles_after_warmup == 0


def test_requests_of_a_stream_that_lose_their_adapter_before_they_begin_end_with_an_error():
    model, prompts = tiny_model(), prompts_of(4)
    adapter = drawn(model, 1)
    engine = small_engine(tiny_model(), max_adapters=1)
    engine.adapters.add("one", adapter)
    names = ["one", None, "one", None]
    samplings = [replace(sampling(name), n=1 + (at == 2)) for at, name in enumerate(names)]
    found = {}
    for result in engine.generate(prompts, samplings, concurrency=1):
        found[result.index, result.choice] = result
        if engine.adapters.names:
            engine.adapters.remove("one")
    assert len(found) == 5
    for (index, _), result in found.items():
        if index == 2:
            assert result.finish_reason == "error" and "got 'one': add it" in result.error
            assert result.prompt == prompts[2] and not result.tokens
        else:
            used = adapter if index == 0 else None
            assert result.tokens == expected(model, [prompts[index]], [used])[0]


def test_accepted_continuations_keep_their_adapter_when_it_is_removed():
    model, (prompt, *_) = tiny_model(), prompts_of(1, longest=40)
    first, second = drawn(model, 1), drawn(model, 2)
    engine = small_engine(tiny_model(), max_adapters=1)
    engine.adapters.add("one", first)
    with AsyncEngine(engine) as serving:

        def submit(count: int) -> list[RequestHandle]:
            return serving.submit_together([(prompt, sampling("one", n=count))])

        handles = submit(3)
        serving.call(lambda own: own.adapters.remove("one"))
        with pytest.raises(ConfigError, match="got 'one': add it"):
            submit(1)
        results = [each.result() for each in handles]
        wanted = expected(model, [prompt], [first])
        assert [each.tokens for each in results] == wanted * 3

        def replace_while_one_waits(own: Engine) -> None:
            own.adapters.remove("one")
            own.adapters.add("two", second)

        serving.call(lambda own: own.adapters.add("one", first))
        computing, waiting = submit(2)
        computing.cancel()
        with pytest.raises(AdapterError, match="1 that requests still use"):
            serving.call(replace_while_one_waits)
        assert waiting.result().tokens == wanted[0]
        serving.call(lambda own: own.adapters.add("two", second))


def test_an_adapter_of_nan_ends_its_own_requests_only():
    model, prompts = tiny_model(), prompts_of(6)
    good, bad = drawn(model, 1), drawn(model, 2)
    for weight in bad.weights.values():
        weight.a.fill_(math.nan)
    engine = small_engine(tiny_model(), max_adapters=2)
    engine.adapters.add("good", good)
    engine.adapters.add("bad", bad)
    results = [*engine.generate(
        [prompt for prompt in prompts for _ in range(3)],
        [sampling(name) for _ in prompts for name in ("bad", "good", None)],
        in_order=True,
    )]  # fmt: skip
    assert {each.finish_reason for each in results[::3]} == {"error"}
    others = [each.tokens for at, each in enumerate(results) if at % 3]
    assert others == expected(model, prompts, [good, None])
    engine.adapters.remove("bad")
    engine.adapters.add("again", good)  # in the slot of the bad one
    assert served(engine, prompts, ["again"]) == expected(model, prompts, [good])


def test_a_step_that_is_rolled_back_computes_each_request_with_its_adapter_again(monkeypatch):
    model, prompts = tiny_model(), prompts_of(4)
    adapter = drawn(model, 1)
    engine = small_engine(tiny_model(), max_adapters=1)
    engine.adapters.add("one", adapter)
    ids = [engine.submit(prompt, sampling(name)) for prompt in prompts for name in ("one", None)]
    engine.step()
    launch = engine.executor.launch
    monkeypatch.setattr(engine.executor, "launch", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    monkeypatch.setattr(engine.executor, "launch", launch)
    results = {}
    while engine.has_work:
        results |= {e.request_id: e.result.tokens for e in engine.step() if e.result is not None}
    assert [results[each] for each in ids] == expected(model, prompts, [adapter, None])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: drawn(tiny_model(hidden_size=32), 1), r"\(64, 64\) inputs and outputs of "),
        (lambda m: drawn(tiny_model(num_hidden_layers=3), 1), "layers.2.*of another base model"),
        (lambda m: drawn(m, 1, rank=9), "a rank of at most 8, got 9"),
        (lambda m: drawn(m, 1, targets=("down_proj",)), "adapter_targets has q_proj, v_proj only"),
        (lambda m: "missing/folder", "adapter missing/folder: expected a directory"),
        (lambda m: Adapter("mine", {}), "adapter mine: expected weights, got none"),
        (lambda m: of_q(torch.ones(4, 64), torch.ones(64, 1)), r"\[4, 64\] and \[64, 1\]"),
        (lambda m: of_q(torch.ones(4), torch.ones(64, 4)), r"\[4\] and \[64, 4\]"),
    ],
    ids=["other sizes", "more layers", "rank", "target", "folder", "empty", "ranks", "vector"],
)
def test_an_adapter_that_does_not_fit_changes_nothing(make, message):
    model, prompts = tiny_model(), prompts_of(3)
    engine = small_engine(
        tiny_model(), max_adapters=2, max_adapter_rank=8, adapter_targets=("q_proj", "v_proj")
    )
    adapter = drawn(model, 1)
    engine.adapters.add("one", adapter)
    with pytest.raises(AdapterError, match=message) as error:
        engine.adapters.add("two", make(model))
    assert "\n" not in str(error.value) and engine.adapters.names == ["one"]
    assert served(engine, prompts, ["one", None]) == expected(model, prompts, [adapter, None])


def test_names_are_unique_and_places_are_counted(tmp_path):
    model = tiny_model()
    folder = saved(tmp_path / "it", tensors(model, ("q_proj",), 4, 0), settings(4))
    engine = small_engine(tiny_model(), max_adapters=1)
    for name in ("", "two\nlines"):
        with pytest.raises(
            ConfigError, match=f"a name for an adapter, got {re.escape(repr(name))}"
        ):
            engine.adapters.add(name, folder)
    engine.adapters.add("one", folder)
    with pytest.raises(AdapterError, match="expected a new name for an adapter, got 'one'"):
        engine.adapters.add("one", folder)
    with pytest.raises(AdapterError, match="expected at most 1 adapters, got 'two'"):
        engine.adapters.add("two", folder)
    with pytest.raises(ConfigError, match=r"name of an adapter \(one\), got 'two'"):
        engine.adapters.remove("two")
    with pytest.raises(ValueError, match="expected adapter: None or the name of an adapter, got 3"):
        SamplingParams(adapter=3)


def test_the_report_has_slots_and_open_requests_of_each_adapter():
    model = tiny_model()
    assert small_engine().report().adapters == {}
    engine = small_engine(tiny_model(), max_adapters=3, max_adapter_rank=8)
    for name in ("one", "two"):
        engine.adapters.add(name, drawn(model, 1))
    for name in ("one", None, "one"):
        engine.submit(prompts_of(1)[0], sampling(name))
    layers = engine.executor.adapters.layers.values()
    elements = sum(each.in_features + each.out_features for each in layers)
    assert engine.report().adapters == {
        "slots": 3, "rank": 8, "bytes": 4 * 8 * 4 * elements, "requests": {"one": 2, "two": 0},
    }  # fmt: skip


def test_the_slots_are_counted_before_the_cache_gets_the_rest_of_the_memory(monkeypatch):
    config = EngineConfig(max_adapters=3, max_adapter_rank=8)
    given = (3, 8, ("q_proj", "v_proj"), 4)
    pool = small_engine(
        tiny_model(), max_adapters=3, max_adapter_rank=8, adapter_targets=given[2]
    ).executor.adapters
    assert bytes_of_slots(tiny_model(), *given) == pool.nbytes
    assert bytes_of_slots(tiny_model(), 0, *given[1:]) == 0
    free = 2 * bytes_of_slots(tiny_model(), 3, 8, (), 4)
    monkeypatch.setattr(cache_size, "free_bytes", lambda _: free)
    (_, _), (half, _) = cache_size._budgets(tiny_model(), config)
    (_, _), (more, _) = cache_size._budgets(tiny_model(), EngineConfig())
    assert half <= free // 4 < more <= free // 2
    monkeypatch.setattr(cache_size, "memory_for", lambda _: free // 2 + 1000)
    cache_size._refuse_beyond_memory(tiny_model(), config, 1, 1000)
    with pytest.raises(ConfigError, match="expected a KV cache of at most 1,000"):
        cache_size._refuse_beyond_memory(tiny_model(), config, 1, 1001)


def test_engines_that_cannot_have_adapters_say_so(tmp_path):
    with pytest.raises(AdapterError, match="got max_adapters 0: set max_adapters"):
        small_engine().adapters.add("one", drawn(tiny_model(), 1))
    with pytest.raises(ConfigError, match="expected a model of float32 or bfloat16"):
        small_engine(tiny_model().double(), max_adapters=1)
    with pytest.raises(AdapterError, match=r"expected linear layers .* named nothing_proj"):
        small_engine(tiny_model(), max_adapters=1, adapter_targets=("nothing_proj",))


def test_targets_are_not_the_letters_of_a_name():
    with pytest.raises(ConfigError, match=r"a tuple of names, got 'q_proj': write \('q_proj',\)"):
        EngineConfig(max_adapters=1, adapter_targets="q_proj")


def test_a_rank_that_no_kernel_has_is_refused_where_it_is_given():
    with pytest.raises(ConfigError, match="expected max_adapter_rank <= 1024, got 1025: merge"):
        EngineConfig(max_adapters=1, max_adapter_rank=1025)
    adapter = drawn(tiny_model(), 1, rank=1025)
    config, _ = with_adapters(EngineConfig(), {"large": adapter})
    assert config.max_adapter_rank == 1024
    with pytest.raises(AdapterError, match="at most 1024, got 1025: raise max_adapter_rank"):
        AdapterPool(1, 1024, (), 1).check(adapter)


def test_targets_that_were_given_are_not_replaced_by_those_of_adapters():
    given = {"both": drawn(tiny_model(), 1)}
    for targets, expected in (((), ("q_proj", "v_proj")), (("q_proj",), ("q_proj",))):
        config, _ = with_adapters(EngineConfig(adapter_targets=targets), given)
        assert config.adapter_targets == expected and config.max_adapters == 1


def test_adapters_are_refused_by_name_with_the_same_bits():
    given = {"sql": drawn(tiny_model(), 1)}
    with pytest.raises(ConfigError, match="no adapters with same_bits, got 'sql': merge them"):
        with_adapters(EngineConfig(same_bits=True), given)


def test_a_closed_executor_restores_the_layers_of_its_model():
    model, prompts = tiny_model(), prompts_of(2)
    before = {name: type(module) for name, module in model.named_modules()}
    engine = small_engine(model, max_adapters=1, weights="plain")
    engine.adapters.add("one", drawn(tiny_model(), 1))
    served(engine, prompts, ["one"])
    engine.executor.close()
    assert {name: type(module) for name, module in model.named_modules()} == before
    again = small_engine(model, max_adapters=1)
    assert served(again, prompts, [None]) == expected(tiny_model(), prompts, [None])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_graphs_serve_adapters_without_python_and_without_a_compile(dtype):
    model, prompts = tiny_model().to(dtype), prompts_of(4)
    adapters = [drawn(model, seed, targets=ALL) for seed in range(3)]
    tokens = []
    for backend in ("eager", "inductor"):
        config = EngineConfig(**SIZES | {"backend": backend, "max_adapters": 3})
        engine = Engine(tiny_model().to(dtype), config)
        engine.warmup()
        for number, adapter in enumerate(adapters):
            engine.adapters.add(str(number), adapter)
        tokens.append(served(engine, prompts, [None, "0", "1", "2"]))
        assert engine.report().compiles_after_warmup == 0
    assert "graphs run without Python" in engine.executor.report().notes["replay"]
    if dtype is torch.float32:
        assert tokens[0] == tokens[1] == expected(model, prompts, [None, *adapters])
