"""An engine serves with whatever executor it is given: here one that counts, without a model."""

from __future__ import annotations

import pytest
import torch

from compiled_attn.engine import ConfigError, Engine, EngineConfig, SamplingParams
from compiled_attn.engine.local import LocalExecutor
from graphs import CaptureError
from graphs.backends.eager import EagerBackend
from tests.compiled_attn.engine.counting import Counting
from tests.compiled_attn.tiny import plain_generate, tiny_model


def test_a_model_is_the_short_form_of_a_local_executor():
    model = tiny_model()
    config = EngineConfig(16, 4, block_size=4, num_blocks=20, backend="eager", max_graphs=3)
    executor = LocalExecutor(model, config)
    engine = Engine(executor)
    assert engine.config is config
    engine.warmup()
    (result,) = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=5))
    assert result.tokens == plain_generate(model, [1, 2, 3], 5)
    with pytest.raises(RuntimeError, match="make another one"):
        Engine(executor)


def test_the_configuration_of_an_executor_is_that_of_its_engine():
    with pytest.raises(ConfigError, match="leave it out"):
        Engine(Counting(), EngineConfig(max_seqs=3))


@pytest.mark.parametrize("strict", [True, False])
def test_where_nothing_can_be_captured_the_error_is_of_the_steps(strict):
    class Broken(EagerBackend):
        def capture(self, *_, **__):
            raise RuntimeError("compiler missing")

    config = EngineConfig(
        16, 4, block_size=4, num_blocks=20, max_graphs=3, backend=Broken(), strict=strict
    )
    engine = Engine(tiny_model(), config)
    for _ in range(2):
        with pytest.raises(CaptureError, match=r"step\[.* compiler missing; 3 of 3 buckets .* fix"):
            engine.warmup()


@pytest.mark.parametrize("wrong", ["a/model", torch.nn.Linear(2, 2), None])
def test_what_is_neither_model_nor_executor_is_refused_in_one_line(wrong):
    with pytest.raises(TypeError, match=r"expected a causal language model .*load_model$"):
        Engine(wrong)
