"""Every kind of corruption is found in a real engine, which serves on afterwards."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.models.hf.attention import PagedStep
from compiled_attn.testing import CorruptCache
from compiled_attn.testing.sanitizer import KINDS
from tests.compiled_attn.engine.small import SIZES, greedy, plain, prompts_of, small_engine
from tests.compiled_attn.testing.sanitizer.faults import FAULTS
from tests.compiled_attn.tiny import tiny_model
from tests.slow import slow_but

PROMPTS = prompts_of(3, seed=3, longest=20)
QUICK = [("native", "eager"), ("portable", "eager"), ("native", "aot_eager")]
ALL = itertools.product(("native", "portable"), ("eager", "aot_eager", "inductor"))


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return plain(tiny_model(), PROMPTS[:2], 3)


@pytest.mark.parametrize(("kernel", "backend"), slow_but(QUICK, ALL))
def test_each_kind_is_found_at_once(kernel: str, backend: str, expected: list[list[int]]) -> None:
    settings: dict[str, Any] = {"kernel": kernel, "backend": backend, "max_graphs": 1}
    engine = small_engine(sanitize=True, **settings)
    for kind, fault in FAULTS.items():
        for prompt in PROMPTS:
            engine.submit(prompt, SamplingParams(max_new_tokens=40))
        for _ in range(5):
            engine.step()
        before = engine._steps.watch.ledger.step  # type: ignore[union-attr]
        assert len(engine.scheduler.running) == 3
        with fault(engine), pytest.raises(CorruptCache, match=KINDS[kind][:20]) as caught:
            for _ in range(3):
                engine.step()
        error = caught.value
        assert error.kind == kind, str(error)
        assert error.step > before
        assert (error.request is None) == (kind == "padding_write")
        assert kind == "stale_table" or error.block is not None
        for each in engine.open_requests:
            engine.abort(each)
        engine.take_events()
    assert greedy(engine, PROMPTS[:2], 3) == expected


@pytest.mark.parametrize(
    ("kernel", "backend"),
    slow_but(
        [("native", "aot_eager"), ("portable", "eager")],
        itertools.product(("native", "portable"), ("eager", "aot_eager")),
    ),
)
def test_a_layer_that_uses_the_cache_of_another_one_is_found(
    kernel: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {**SIZES, "kernel": kernel, "backend": backend, "max_graphs": 1}
    engine = Engine(tiny_model(), EngineConfig(**settings, sanitize=True))
    of_layer = PagedStep.of_layer
    # After the trial of the model, which refuses it.
    monkeypatch.setattr(PagedStep, "of_layer", lambda step, layer: of_layer(step, 0))
    engine.warmup()
    engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=2))
    with pytest.raises(CorruptCache) as found:
        engine.step()
    assert (found.value.kind, found.value.layer, found.value.step) == ("wrong_layer", 1, 1)
