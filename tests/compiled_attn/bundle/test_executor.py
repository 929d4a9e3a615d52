from __future__ import annotations

import pytest

from compiled_attn import LLM
from compiled_attn.bundle import Bundle, BundleExecutor, folder
from compiled_attn.engine import Engine, EngineConfig
from tests.compiled_attn.bundle.conftest import PROMPTS, SHORT


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
    with pytest.raises(TypeError, match="no config with a bundle"):
        LLM(config=EngineConfig(), bundle=written.folder)
    with pytest.raises(TypeError, match="a model or a bundle"):
        LLM()
