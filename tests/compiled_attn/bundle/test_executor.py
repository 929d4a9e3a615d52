from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from compiled_attn import LLM, Scorer
from compiled_attn.bundle import (
    Bundle,
    BundleError,
    BundleExecutor,
    BundleMisfit,
    folder,
    write_bundle,
)
from compiled_attn.bundle.executor import SOURCES
from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.models import ModelError, load_model
from tests.compiled_attn.bundle.conftest import PROMPTS, SHORT
from tests.compiled_attn.bundle.signed import change_json, change_manifest


def test_the_process_that_made_a_bundle_can_serve_it_too(written):
    with LLM(bundle=Bundle(written.folder)) as llm:
        assert [answer.text for answer in llm.generate(PROMPTS, SHORT)] == written.texts
        assert llm.engine.report().backend == "bundle"


def test_a_step_beyond_the_buckets_is_cut(written):
    engine = Engine(BundleExecutor(Bundle(written.folder)))
    engine.warmup()
    (result,) = engine.generate([[5] * 100], SHORT)
    assert len(result.tokens) == SHORT.max_new_tokens


def test_another_machine_compiles_only_when_asked(written, monkeypatch, caplog):
    monkeypatch.setattr(folder, "instruction_features", lambda: frozenset())
    with pytest.raises(folder.BundleMisfit):
        LLM(bundle=written.folder)
    config = EngineConfig(backend="eager", max_seqs=2, max_tokens_per_step=16, block_size=8)
    with LLM(written.model, config, bundle=written.folder) as llm:
        assert llm.engine.report().backend == "eager"
    assert "compiling the model instead" in caplog.text


def test_a_bundle_takes_no_other_configuration(written):
    with pytest.raises(TypeError, match="expected no config, tokenizer with a bundle"):
        LLM(config=EngineConfig(), tokenizer=written.model, bundle=written.folder)
    with pytest.raises(TypeError, match="expected no dtype, device with a bundle"):
        LLM(dtype=torch.bfloat16, device="cpu", bundle=written.folder)
    with pytest.raises(TypeError, match="a model or a bundle"):
        LLM()


@pytest.fixture
def copy(written, tmp_path):
    return shutil.copytree(written.folder, tmp_path / "copy")


def test_kernels_of_another_processor_are_refused_before_they_are_loaded(copy):
    change_manifest(copy, isa="neon", libraries=[folder.WEIGHTS])
    with pytest.raises(BundleMisfit, match="a processor with neon, got one with"):
        LLM(bundle=copy)


def test_sizes_that_do_not_fit_together_are_refused_and_leave_nothing(copy):
    whole = json.loads((copy / folder.MANIFEST).read_text())
    threads = torch.get_num_threads()
    for changes in (
        {"engine": {}},
        {"engine": whole["engine"] | {"num_blocks": "x"}},
        {"engine": whole["engine"] | {"config": {"unknown": 1}}},
        {"engine": whole["engine"] | {"cache_dtype": "no_such"}},
        {"engine": whole["engine"] | {"cache_bytes": 1 << 60}},
    ):
        change_manifest(copy, **(whole | {"threads": threads + 1} | changes))
        with pytest.raises(BundleError, match="expected") as refused:
            LLM(bundle=copy)
        assert "\n" not in str(refused.value)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    "change",
    [
        lambda found: {"weights": {name: [1 << 62, 64] for name in found["weights"]}},
        lambda found: {"weights": {name: [-64, 64] for name in found["weights"]}},
        lambda found: {"weights": {}},
        lambda found: {"inputs": [each[:-1] for each in found["inputs"]]},
        lambda found: {"inputs": [[["field", 99]] * len(each) for each in found["inputs"]]},
        lambda found: {"shapes": found["shapes"][:-1]},
        lambda found: {"libraries": ["none.so"]},
    ],
)
def test_sources_that_do_not_fit_the_files_are_refused(copy, change):
    found = json.loads((copy / SOURCES).read_text())
    change_json(copy, SOURCES, **change(found))
    with pytest.raises(BundleError, match="expected files that fit together"):
        LLM(bundle=copy)


def test_a_tokenizer_of_other_contents_is_refused(copy):
    change_json(copy, "tokenizer_facts.json", more=1)
    with pytest.raises(ModelError, match=r"expected a tokenizer, got none .* make it again"):
        LLM(bundle=copy)


@pytest.mark.slow
def test_a_bundle_of_an_engine_with_the_same_bits_serves_them(written, tmp_path):
    shutil.copytree(written.model, model := tmp_path / "model")
    settings = AutoConfig.from_pretrained(model, intermediate_size=64)  # can be packed
    AutoModelForCausalLM.from_config(settings).save_pretrained(model)
    sizes = {"max_seqs": 3, "max_tokens_per_step": 16, "num_blocks": 32, "block_size": 8}
    config = EngineConfig(**sizes, max_graphs=4, context=128, store=False, same_bits=True)
    with LLM(model, config) as llm:
        write_bundle(llm.engine.executor, llm.tokenizer.of_transformers, tmp_path / "b", "tiny")
    prompts = [[*range(5, 5 + length)] for length in (1, 2, 8, 30, 47)]
    asked = SamplingParams(max_new_tokens=12, temperature=1.0, seed=3, logprobs=0)
    with LLM(bundle=tmp_path / "b") as llm:
        results = [*llm.engine.generate(prompts, asked, in_order=True)]
    scorer = Scorer(load_model(model), config)
    for prompt, result in zip(prompts, results, strict=True):
        expected = scorer.score([*prompt, *result.tokens])[len(prompt) - 1 :]
        assert [each.logprob for each in result.logprobs] == expected.tolist()
    scorer.close()
