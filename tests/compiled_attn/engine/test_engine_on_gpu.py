"""An engine on a GPU: the tokens of a CPU in float32, also where NaN lies all around, by replays.

The same runs on the fake device, with a double that records graphs. What only some machines have is
imported where it is used.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import ClassVar

import pytest
import torch

from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from graphs.backends.accelerator import AcceleratorBackend
from graphs.backends.cudagraph import CudaGraphBackend, CudaRecorder
from graphs.backends.recorded import Recording
from graphs.capture.contract import Backend
from tests.compiled_attn.tiny import plain_generate, tiny_model
from tests.slow import slow_but

pytestmark = pytest.mark.usefixtures("fresh_compiler")

CONFIG = EngineConfig(16, 4, block_size=4, num_blocks=40, context=64, kernel="native", max_graphs=4)
# Chunks of the long ones share steps with tokens that others decode.
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [3, 4], [(5 * n) % 120 for n in range(1, 38)], [5] * 9, [8] * 21]
COUNT = 8
GREEDY = SamplingParams(max_new_tokens=COUNT)
FAMILIES = {"llama": "GQA", "mistral": "a window", "gemma2": "softcap"}
SAMPLED = {
    "random": dict(temperature=0.8, seed=1),
    "of the likeliest": dict(temperature=1.5, top_k=5, top_p=0.9, min_p=0.02, seed=2),
    "penalties": dict(temperature=0.7, repetition_penalty=1.3, seed=4),
    "logprobs": dict(logprobs=2, prompt_logprobs=1),
}


class Counting(CudaRecorder):
    """Records on the GPU, and counts replays."""

    replays = 0

    def record(self, call):
        recording = super().record(call)

        def replay() -> None:
            self.replays += 1
            recording.replay()

        return Recording(replay, recording.outputs, recording.close)


class Recorded(CudaGraphBackend):
    """Records the steps: compiled code on a GPU, eager code on the fake device."""

    def __init__(self, device: str) -> None:
        self.recorders: list[Counting] = []
        self._device = device
        compiler = "inductor" if device == "cuda" else "eager"
        self.options = {**CudaGraphBackend.options, "compiler": compiler}
        super().__init__(self._recorder_of)

    def _recorder_of(self):
        self.recorders.append(Counting() if self._device == "cuda" else double(self._device))
        return self.recorders[-1]


def double(device: str):
    from tests.graphs.backends.replay_double import ReplayDouble

    return ReplayDouble(device=device)


DEVICES = {"fake_device": ("eager", "cudagraph"), "cuda": ("eager", "inductor", "cudagraph")}
RUNS = [
    pytest.param(device, backend, marks=[pytest.mark.gpu] if device == "cuda" else [])
    for device, backends in DEVICES.items()
    for backend in backends
]


def engine_on(device: str, backend: str | Backend, family: str, **changes) -> Engine:
    """Warmed up, on a device that is there."""
    if device == "fake_device":
        if torch.cuda.is_available():
            pytest.skip("torch has one accelerator a process, and this machine's is a GPU")
        from tests.fake_device import open_device

        open_device()
    made = Recorded(device) if backend == "cudagraph" else backend
    config = replace(CONFIG, backend=made, **changes)
    engine = Engine(tiny_model(family).to(device), config)
    engine.warmup()
    for recorder in getattr(made, "recorders", ()):
        recorder.replays = 0
    return engine


def generated(engine: Engine, on_step=None, sampling=GREEDY) -> list[list[int]]:
    results = engine.generate(PROMPTS, sampling, in_order=True, on_step=on_step)
    return [result.tokens for result in results]


@cache
def on_cpu_engine(sampling: str = "", **changes) -> list[list[int]]:
    """Tokens of an engine on a CPU, which tests of its own hold to oracles."""
    engine = Engine(tiny_model(), replace(CONFIG, backend="eager", **changes))
    engine.warmup()
    return generated(engine, sampling=sampling_of(sampling))


def sampling_of(name: str) -> SamplingParams:
    return SamplingParams(max_new_tokens=COUNT, **SAMPLED.get(name, {}))


@cache
def on_cpu(family: str) -> list[list[int]]:
    """Tokens of plain `generate`."""
    model = tiny_model(family)
    return [plain_generate(model, prompt, COUNT) for prompt in PROMPTS]


def assert_replayed(engine: Engine) -> None:
    """Every step replayed its graph, if graphs are recorded; and nothing was compiled late."""
    report = engine.report()
    assert (report.compiles_after_warmup, report.graph_breaks, report.fallbacks) == (0, 0, 0)
    assert report.kernel == "native"
    if isinstance(backend := engine.executor.config.backend, Recorded):
        steps, *_ = backend.recorders
        assert steps.replays == report.steps > 0
        assert report.replays == sum(each.replays for each in backend.recorders)
    else:
        assert report.replays == 0


@pytest.mark.parametrize(
    ("family", "async_scheduling"),
    slow_but(
        [*product(FAMILIES, (True,)), ("llama", False)],
        product(FAMILIES, (True, False)),
    ),
)
@pytest.mark.parametrize(("device", "backend"), RUNS)
def test_tokens_are_those_of_a_cpu(device, backend, family, async_scheduling):
    engine = engine_on(device, backend, family, async_scheduling=async_scheduling)
    assert generated(engine) == on_cpu(family)
    assert bool(engine.report().steps_ahead) is async_scheduling
    assert_replayed(engine)


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILIES.get)
@pytest.mark.parametrize(("device", "backend"), RUNS)
def test_nan_in_the_null_block_and_in_unused_blocks_changes_nothing(device, backend, family):
    engine = engine_on(device, backend, family)
    buffers = [each for each in engine.executor.cache.buffers() if each.is_floating_point()]
    for buffer in buffers:
        buffer.fill_(float("nan"))

    def poison(_) -> None:
        for buffer in buffers:
            buffer[: CONFIG.block_size].fill_(float("nan"))  # what padding has written there

    assert generated(engine, poison) == on_cpu(family)
    assert engine.report().nonfinite_rows == 0
    assert_replayed(engine)


class OfAccelerator(AcceleratorBackend):
    """Records eager code with torch's own graphs."""

    options: ClassVar = {**AcceleratorBackend.options, "compiler": "eager"}


@pytest.mark.skipif(
    not hasattr(torch.accelerator, "Graph"), reason="torch 2.13 is the first with its Graph"
)
@pytest.mark.parametrize("device", ["fake_device", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_steps_replay_graphs_of_the_accelerator(device):
    engine = engine_on(device, OfAccelerator(), "mistral")
    assert generated(engine) == on_cpu("mistral")
    report = engine.report()
    assert (report.compiles_after_warmup, report.graph_breaks, report.fallbacks) == (0, 0, 0)
    assert report.kernel == "native" and report.replays >= report.steps > 0


class FullOnce(Recorded):
    """Runs out of memory in the second recording: on a GPU while it records."""

    recordings = 0

    def _recorder_of(self):
        recorder = super()._recorder_of()
        record = recorder.record

        def recorded(call):
            self.recordings += 1
            if self.recordings != 2:
                return record(call)
            if self._device != "cuda":
                raise torch.OutOfMemoryError("out of memory")
            return record(lambda: (call(), torch.empty(1 << 50, device="cuda")))

        setattr(recorder, "record", recorded)  # noqa: B010
        return recorder


@pytest.mark.parametrize("device", ["fake_device", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_engine_whose_recording_ran_out_of_memory_serves_and_can_record_again(device):
    engine = engine_on(device, FullOnce(device), "llama", strict=False)
    (failed,) = engine.warmup_report.failed
    assert "memory" in failed.error
    assert generated(engine) == on_cpu("llama")
    assert not engine.warmup().failed
    assert generated(engine) == on_cpu("llama")
    report = engine.report()
    assert (report.compiles_after_warmup, report.graph_breaks) == (0, 0)


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize(("device", "backend"), RUNS)
def test_sampled_tokens_are_those_of_a_cpu(device, backend, name):
    engine = engine_on(device, backend, "llama")
    assert generated(engine, sampling=sampling_of(name)) == on_cpu_engine(name)
    report = engine.report()
    assert (report.compiles_after_warmup, report.graph_breaks, report.fallbacks) == (0, 0, 0)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize(("device", "backend"), RUNS)
def test_caches_of_8_bits_give_the_tokens_of_a_cpu(device, backend, kv_dtype):
    engine = engine_on(device, backend, "llama", kv_dtype=kv_dtype)
    assert generated(engine) == on_cpu_engine(kv_dtype=kv_dtype)
    assert_replayed(engine)


@pytest.mark.parametrize(("device", "backend"), RUNS)
def test_requests_that_give_up_their_blocks_have_the_tokens_of_a_cpu(device, backend):
    engine = engine_on(device, backend, "llama", num_blocks=18, max_seqs=4)
    assert generated(engine) == on_cpu("llama")
    assert engine.report().preemptions
    assert_replayed(engine)
