"""An engine on a device that is not the CPU: the same tokens, one copy in and one out a step."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.engine.cache_size import CacheSize
from graphs.backends.cudagraph import CudaGraphBackend
from tests.compiled_attn.tiny import tiny_model
from tests.fake_device import counts, open_device
from tests.graphs.backends.hpu_bridge import Bridge, stubbed_bridge
from tests.graphs.backends.replay_double import ReplayDouble
from tests.slow import slow_but

CONFIG = EngineConfig(
    16, 4, block_size=4, num_blocks=40, context=64, backend="eager", max_graphs=4, defrag_waste=1
)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [3, 4], [9, 8, 7, 6, 5, 4, 3, 2, 1, 2, 3, 4, 5, 6, 7], [5] * 9]
GREEDY = SamplingParams(max_new_tokens=8)
RANDOM = [
    SamplingParams(max_new_tokens=8, temperature=0.8, seed=1),
    SamplingParams(max_new_tokens=8, temperature=1.5, top_k=5, seed=2),
    SamplingParams(max_new_tokens=8, temperature=1.0, top_p=0.7, min_p=0.05, seed=3),
    GREEDY,
]
ON_HOST = [
    SamplingParams(max_new_tokens=8, repetition_penalty=1.3, temperature=0.7, seed=4),
    SamplingParams(max_new_tokens=8, logprobs=2, prompt_logprobs=1),
    SamplingParams(max_new_tokens=8, logit_bias={3: 5.0}),
    RANDOM[0],
]


@pytest.fixture(autouse=True)
def _device():
    open_device()


def served(device, sampling=GREEDY, config=CONFIG, family="llama", prompts=PROMPTS, **sizes):
    """Results of the requests, and the device calls of each step."""
    engine = Engine(tiny_model(family, **sizes).to(device), config)
    engine.warmup()
    for double in getattr(config.backend, "doubles", ()):
        double.replays = 0
    before, spent = counts(), []

    def on_step(_) -> None:
        nonlocal before
        before, past = counts(), before
        spent.append(before.since(past))

    results = [*engine.generate(prompts, sampling, in_order=True, on_step=on_step)]
    return results, spent, engine


def tokens(results):
    return [result.tokens for result in results]


def each_step(spent):
    """Copies in, copies out and waits of a step on average, and all torn copies."""
    sums = [sum(kind) for kind in zip(*spent, strict=True)]
    return *(total / len(spent) for total in sums[:3]), sums[-1]


@pytest.mark.parametrize("kernel", ["native", "portable"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "qwen3"])
def test_tokens_are_those_of_a_cpu_and_nothing_waits(family, kernel):
    config = replace(CONFIG, kernel=kernel)
    here, _, _ = served("cpu", config=config, family=family)
    there, spent, engine = served("fake_device", config=config, family=family)
    assert tokens(there) == tokens(here)
    assert engine.executor.kernel.name == kernel
    # Where torch has no grouped matmul, transformers reads how many tokens each expert gets.
    read = 4 if family == "gpt_oss" else 0
    assert each_step(spent) == (1, 1 + read, 0, 0)
    assert engine.report().steps_ahead > len(spent) / 2


def test_a_device_that_is_not_the_current_one_serves_as_well():
    here, _, _ = served("cpu", RANDOM)
    there, spent, engine = served("fake_device:1", RANDOM)
    assert tokens(there) == tokens(here) and torch.accelerator.current_device_index() == 0
    assert engine.executor.cache.key(0).device == torch.device("fake_device:1")
    assert each_step(spent) == (1, 1, 0, 0)


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_without_async_scheduling_every_call_computes_its_own_step(sampling):
    ahead, _, _ = served("fake_device", sampling)
    alone, spent, engine = served("fake_device", sampling, replace(CONFIG, async_scheduling=False))
    assert tokens(alone) == tokens(ahead)
    assert {each[:3] for each in spent} == {(1, 1, 0)} and engine.report().steps_ahead == 0


@pytest.mark.parametrize("sampling", [RANDOM, ON_HOST], ids=["random", "on host"])
@pytest.mark.parametrize("kernel", ["native", "portable"])
def test_sampled_tokens_are_those_of_a_cpu(kernel, sampling):
    config = replace(CONFIG, kernel=kernel)
    here, _, _ = served("cpu", sampling, config)
    there, spent, engine = served("fake_device", sampling, config)
    assert tokens(there) == tokens(here)
    assert bool(engine.report().steps_ahead) == (sampling is RANDOM)
    for one, other in zip(there, here, strict=True):
        assert (one.logprobs is None) == (other.logprobs is None)
        for got, expected in zip(one.logprobs or [], other.logprobs or [], strict=True):
            assert got.token == expected.token
            assert got.logprob == pytest.approx(expected.logprob, abs=1e-5)
    assert each_step(spent) == (1, 1, 0, 0)


def test_moved_blocks_take_one_copy_more_and_nothing_waits():
    config = replace(CONFIG, num_blocks=14, defrag_waste=0.0)
    prompts = [[7, 7, 7, 7, 7, 1 + n % 3, n % 5] * 2 for n in range(14)]
    here, _, _ = served("cpu", config=config, prompts=prompts)
    there, spent, engine = served("fake_device", config=config, prompts=prompts)
    assert tokens(there) == tokens(here)
    report = engine.report()
    assert report.preemptions and engine.memory.figures()["defrag_moves"]
    copies_in, copies_out, waits, torn = each_step(spent)
    assert copies_in > 1 and (copies_out, waits, torn) == (1, 0, 0)
    assert 0 < report.steps_ahead < report.steps


def test_a_request_whose_logits_are_not_finite_fails_alone():
    def poisoned(device):
        model = tiny_model().to(device)
        model.model.embed_tokens.weight.data[99] = float("nan")
        engine = Engine(model, CONFIG)
        engine.warmup()
        prompts = [[1, 2, 3], [4, 99, 5], [6, 7, 8]]
        return [*engine.generate(prompts, [GREEDY, GREEDY, RANDOM[0]], in_order=True)]

    here, there = poisoned("cpu"), poisoned("fake_device")
    assert [each.finish_reason for each in there] == ["length", "error", "length"]
    assert tokens(there) == tokens(here) and there[1].error == here[1].error


def test_its_cache_takes_a_share_of_the_memory_that_is_free_on_the_device():
    config = replace(CONFIG, num_blocks=None, context=256, max_seqs=16)
    engine = Engine(tiny_model().to("fake_device"), config)
    assert engine.sizing.cache.why == "max_seqs requests of full context"
    assert engine.executor.cache.key(0).device.type == "fake_device"
    wide = replace(config, max_seqs=8192, max_tokens_per_step=8192, kernel="portable")
    size = CacheSize.of(tiny_model().to("fake_device"), wide, 256)
    assert "four fifths of 0.8 GiB free on fake_device:0" in size.why
    assert 0.5 * 2**30 < size.bytes <= 0.6 * 2**30


class Recorded(CudaGraphBackend):
    """Records eager code, on doubles of CUDA graphs that know addresses only."""

    options: ClassVar = {**CudaGraphBackend.options, "compiler": "eager"}

    def __init__(self) -> None:
        self.doubles: list[ReplayDouble] = []
        super().__init__(self._double)

    def _double(self) -> ReplayDouble:
        self.doubles.append(ReplayDouble(device="fake_device"))
        return self.doubles[-1]


@pytest.fixture
def bridge(monkeypatch) -> Bridge:
    return stubbed_bridge(monkeypatch)


def test_on_gaudi_every_step_replays_a_graph_of_parts(bridge):
    here, _, _ = served("cpu", RANDOM, replace(CONFIG, kernel="portable"))
    engine = Engine(tiny_model().to("fake_device"), replace(CONFIG, backend="hpu"))
    assert engine.executor.kernel.name == "portable" and "shared" in engine.sizing.buckets.names
    engine.warmup()
    addresses = [buffer.data_ptr() for buffer in engine.executor.cache.buffers()]
    del bridge.log[:]
    before = counts()
    there = [*engine.generate(PROMPTS, RANDOM, in_order=True)]
    spent, steps = counts().since(before), engine.report().steps
    assert tokens(there) == tokens(here)
    assert bridge.log.count("replay") >= steps and set(bridge.log) == {"mark", "replay"}
    assert spent[:3] == (steps, steps, 0) and engine.report().steps_ahead
    assert [buffer.data_ptr() for buffer in engine.executor.cache.buffers()] == addresses


@pytest.mark.parametrize("sampling", ON_HOST[:2], ids=["rules", "logprobs"])
def test_a_step_that_has_begun_outlives_a_second_warmup(sampling):
    def served_by(device, backend):
        engine = Engine(tiny_model().to(device), replace(CONFIG, backend=backend))
        engine.warmup()
        engine.submit(PROMPTS[0], GREEDY)
        events = engine.step() + engine.step()
        engine.submit(PROMPTS[1], sampling)
        events += engine.step()  # which begins the one that the host samples
        engine.warmup()
        while engine.has_work:
            events += engine.step()
        texts = sorted((event.index, event.result.tokens) for event in events if event.result)
        return texts, engine.report().steps_ahead

    here, _ = served_by("cpu", "eager")
    there, ahead = served_by("fake_device", Recorded())
    assert there == here and ahead


class RecordedCode(Recorded):
    """Records compiled code, on doubles of CUDA graphs."""

    options: ClassVar = {**CudaGraphBackend.options, "compiler": "aot_eager"}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("recorded", slow_but((True,), (False, True)))
@pytest.mark.parametrize("kernel", slow_but(("native",), ("native", "portable")))
def test_compiled_steps_give_the_tokens_of_a_cpu_and_wait_for_nothing(kernel, recorded):
    config = replace(CONFIG, kernel=kernel)
    sizes = {"num_hidden_layers": 1}
    here, _, _ = served("cpu", RANDOM, config, **sizes)
    backend = RecordedCode() if recorded else "aot_eager"
    config = replace(config, backend=backend)
    there, spent, engine = served("fake_device", RANDOM, config, **sizes)
    assert tokens(there) == tokens(here)
    assert each_step(spent) == (1, 1, 0, 0)
    report = engine.executor.graphs.report
    assert len(report.captured) == len(report.results)
    assert kernel == "portable" or report.graphs < len(report.results)  # sizes are symbols
    if recorded:
        assert backend.doubles[0].replays == engine.report().steps
