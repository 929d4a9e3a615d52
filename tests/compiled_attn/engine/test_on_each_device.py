"""An engine on a device, the same tests on a GPU and on the stand-in: the tokens of a CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from graphs.backends.cudagraph import CudaGraphBackend, CudaRecorder, Recording
from tests.compiled_attn.tiny import tiny_model
from tests.graphs.backends.replay_double import ReplayDouble
from tests.slow import slow_but
from tests.stand_in import NAME, open_device

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.parametrize("device", [NAME, pytest.param("cuda", marks=pytest.mark.gpu)]),
]

CONFIG = EngineConfig(
    16, 4, block_size=4, num_blocks=40, context=64, max_graphs=3, kernel="native", backend="eager"
)
GREEDY = SamplingParams(max_new_tokens=8)
DRAWN = [
    SamplingParams(max_new_tokens=8, temperature=0.8, seed=1),
    SamplingParams(max_new_tokens=8, temperature=1.5, top_k=5, seed=2),
    GREEDY,
    SamplingParams(max_new_tokens=8, temperature=1.0, top_p=0.7, seed=3),
]
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [3, 4], [9, 8, 7, 6, 5, 4, 3, 2, 1, 2, 3, 4, 5, 6, 7], [5] * 9]
BACKENDS = ["eager", "inductor", "cudagraph"]
FAMILIES = ["llama", "mistral", "gemma2", "gemma3_text", "qwen3"]


class CountedRecorder(CudaRecorder):
    """CUDA graphs whose replays are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.replays = 0

    def record(self, call: Any) -> Recording:
        recording = super().record(call)

        def replay() -> None:
            self.replays += 1
            recording.replay()

        return recording._replace(replay=replay)


class CountedGraphs(CudaGraphBackend):
    """Recorded graphs of a device; on the stand-in doubles of them, which know addresses only."""

    def __init__(self, device: str) -> None:
        self.recorders: list[Any] = []
        self._compiler_of = "inductor" if device == "cuda" else "eager"
        super().__init__(lambda: self._made(device))

    def _made(self, device: str) -> Any:
        self.recorders.append(CountedRecorder() if device == "cuda" else ReplayDouble((), device))
        return self.recorders[-1]

    def capture(self, *args: Any, **options: Any) -> Any:
        return super().capture(*args, compiler=self._compiler_of, **options)


def served(device, config, sampling=GREEDY, family="llama", poison=False):
    """The tokens of each request, and the engine; graphs replayed once for each of its steps."""
    model = tiny_model(family)
    if poison:  # all rows of padding, which embed token 0, are NaN in every layer
        model.get_input_embeddings().weight.data[0] = torch.nan
    engine = Engine(model.to(device), config)
    engine.warmup()
    if poison:  # as are the null block and all blocks that no request has written yet
        for buffer in engine.executor.cache.buffers():
            buffer.fill_(torch.nan)
    recorders = getattr(config.backend, "recorders", [])
    for each in recorders:
        each.replays = 0
    tokens = [each.tokens for each in engine.generate(PROMPTS, sampling, in_order=True)]
    report = engine.report()
    assert (report.graph_breaks, report.compiles_after_warmup, report.fallbacks) == (0, 0, 0)
    assert not recorders or recorders[0].replays == report.steps
    return tokens, engine


@cache
def tokens_of_a_cpu(family="llama", drawn=False):
    return served("cpu", CONFIG, DRAWN if drawn else GREEDY, family)[0]


def config_on(device, backend, **changes):
    if device == NAME:
        open_device()
    # Inductor has no code for the stand-in: there what it would compile is traced and run.
    traced = "aot_eager" if device == NAME and backend == "inductor" else backend
    own = CountedGraphs(device) if backend == "cudagraph" else traced
    return replace(CONFIG, backend=own, **changes)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", slow_but(("llama", "gemma2"), FAMILIES))
def test_tokens_are_those_of_a_cpu(device, family, backend):
    there, engine = served(device, config_on(device, backend), family=family)
    assert there == tokens_of_a_cpu(family)
    assert engine.executor.kernel.name == "native" and engine.report().steps_ahead


@pytest.mark.parametrize("backend", ["eager", "cudagraph"])
def test_tokens_are_the_same_without_look_ahead(device, backend):
    there, engine = served(device, config_on(device, backend, look_ahead=False), DRAWN)
    assert there == tokens_of_a_cpu(drawn=True) and engine.report().steps_ahead == 0


@pytest.mark.parametrize("backend", ["eager", "cudagraph"])
def test_drawn_tokens_are_those_of_a_cpu(device, backend):
    there, _ = served(device, config_on(device, backend), DRAWN)
    assert there == tokens_of_a_cpu(drawn=True)


def test_parts_in_plain_torch_give_the_tokens_of_a_cpu(device):
    there, _ = served(device, config_on(device, "cudagraph", kernel="portable"))
    assert there == tokens_of_a_cpu()


@pytest.mark.parametrize("look_ahead", [True, False])
@pytest.mark.parametrize("backend", ["eager", "cudagraph"])
def test_padding_that_is_not_finite_changes_no_token_of_mixed_steps(device, backend, look_ahead):
    config = config_on(device, backend, look_ahead=look_ahead)
    there, engine = served(device, config, poison=True)
    assert there == tokens_of_a_cpu()
    report = engine.report()
    assert not report.nonfinite_rows and report.padding_waste["tokens"] > 0
    null = [buffer[: CONFIG.block_size] for buffer in engine.executor.cache.buffers()]
    assert all(each.isnan().any() for each in null), "padded rows wrote NaN there"
