"""A bundle in another process, which has no compiler, against the engine that it was made of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compiled_attn import LLM
from compiled_attn.bundle import write_bundle
from compiled_attn.bundle.write import _other_settings
from compiled_attn.engine import Engine, EngineConfig
from compiled_attn.errors import ConfigError
from tests.compiled_attn.bundle import served
from tests.compiled_attn.bundle.conftest import PROMPTS, SHORT
from tests.compiled_attn.tiny import tiny_model

_NOT_LOADED = "transformers", "sympy", "triton", "torch._inductor", "torch._dynamo"
_ROOT = Path(__file__).parents[3]


def _answers_of(folder: Path) -> dict:
    arguments = json.dumps([str(folder), PROMPTS, SHORT.max_new_tokens])
    # No folder of programs: nothing can be built.
    environment = os.environ | {"PATH": "", "PYTHONPATH": str(_ROOT)}
    done = subprocess.run(
        [sys.executable, served.__file__, arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def answered(written) -> dict:
    return _answers_of(written.folder)


def test_a_bundle_answers_as_the_engine_that_it_was_made_of(written, answered):
    assert (answered["texts"], answered["chat"]) == (written.texts, written.chat)
    assert answered["compiles"] == 0


@pytest.mark.parametrize(
    "dtype, kv_dtype, bits",
    [
        (torch.float32, "int8", 8),
        pytest.param(torch.bfloat16, "auto", 16, marks=pytest.mark.slow),
    ],
)
def test_a_bundle_has_the_kernels_of_its_cache(written, tmp_path, dtype, kv_dtype, bits):
    sizes = {"max_seqs": 2, "max_tokens_per_step": 16, "num_blocks": 32, "block_size": 8}
    config = EngineConfig(**sizes, max_graphs=2, store=False, kv_dtype=kv_dtype)
    with LLM(written.model, config, dtype=dtype) as llm:
        write_bundle(llm.engine.executor, llm.tokenizer.of_transformers, tmp_path / "b", "tiny")
        texts = [answer.text for answer in llm.generate(PROMPTS, SHORT)]
    assert (tmp_path / "b" / f"library_0-{bits}bit.so").exists()
    assert _answers_of(tmp_path / "b")["texts"] == texts


def test_a_bundle_loads_no_compiler_and_no_transformers(answered):
    loaded = [
        name
        for name in answered["modules"]
        if any(name == each or name.startswith(f"{each}.") for each in _NOT_LOADED)
    ]
    assert loaded == []


def test_processes_share_the_weights(answered):
    assert answered["copied"] == 0


def test_an_existing_folder_stays(written, llm_of_host):
    executor, tokenizer = llm_of_host.engine.executor, llm_of_host.tokenizer.of_transformers
    before = sorted(written.folder.iterdir())
    with pytest.raises(ConfigError, match="backend inductor on the CPU, got eager"):
        write_bundle(executor, tokenizer, written.folder, "tiny")
    assert sorted(written.folder.iterdir()) == before


@pytest.mark.parametrize("setting", [{"sanitize": True}, {"prefix_key": b"secret"}])
def test_settings_that_a_bundle_cannot_keep_are_refused_by_name(setting):
    (name,) = setting
    assert _other_settings(EngineConfig(max_seqs=3, context=64, **setting)) == [name]


@pytest.fixture
def llm_of_host(written) -> LLM:
    config = EngineConfig(backend="eager", max_seqs=2, max_tokens_per_step=8, block_size=8)
    with LLM(written.model, config) as llm:
        yield llm


def test_a_bundle_of_a_model_with_adapters_is_refused(tmp_path):
    config = EngineConfig(max_adapters=1, num_blocks=8, context=32, store=False)
    executor = Engine(tiny_model(), config).executor
    with pytest.raises(ConfigError, match="a bundle needs a model without adapters, got"):
        write_bundle(executor, None, tmp_path / "b", "tiny")
