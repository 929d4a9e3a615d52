"""What `LLM` is made of, how it shows its start, and how it ends."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from compiled_attn import LLM
from compiled_attn.engine import EngineConfig, SamplingParams, local
from compiled_attn.errors import ConfigError, ModelRefused
from compiled_attn.text import Tokenizer
from tests.compiled_attn.models.adapters.test_wrappers import Wrapper
from tests.compiled_attn.text.models import save_chat_model

MESSAGE = {"role": "user", "content": "a question"}
SHORT = SamplingParams(max_tokens=9)


@pytest.fixture
def model(model_dir: Path):
    return AutoModelForCausalLM.from_pretrained(model_dir)


def test_a_message_is_a_chat(llm):
    (expected,) = llm.chat([MESSAGE], SHORT)
    (answer,) = llm.chat(MESSAGE, SHORT)
    assert answer.text == expected.text and len(answer.result.tokens) == 9
    assert "".join(llm.stream(MESSAGE, SHORT)) == answer.text
    with pytest.raises(ConfigError, match="expected a list of prompts"):
        llm.generate(MESSAGE)
    with pytest.raises(ConfigError, match=r'expected messages, got .*"role": "user"'):
        llm.chat("hello")


@pytest.mark.parametrize("given", [AutoTokenizer.from_pretrained, Tokenizer, str, Path])
def test_a_model_object_is_served_as_it_is(model, model_dir, config, llm, given):
    (expected,) = llm.generate(["Hello"], SHORT)
    tokenizer = given(model_dir)
    if isinstance(tokenizer, Tokenizer):
        tokenizer = tokenizer.of_transformers
    with LLM(model, config, tokenizer=tokenizer) as own:
        assert own.model is model
        assert own.generate(["Hello"], SHORT)[0].text == expected.text


def test_a_closed_llm_gives_its_model_back_and_says_that_it_is_closed(model, model_dir, config):
    attention = model.config._attn_implementation
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        before = model(ids).logits
    with LLM(model, config, tokenizer=str(model_dir)) as own:
        stream = own.stream("Hello", SHORT)
        next(stream)
        assert model.config._attn_implementation != attention
        executor = own.engine.executor
    own.close()
    assert model.config._attn_implementation == attention
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, before)  # layers stay packed
    assert executor.graphs.pending == len(executor.graphs.buckets)
    with pytest.raises(RuntimeError, match="expected an open LLM, got one that was closed"):
        own.generate(["Hello"])


def test_a_model_object_without_a_tokenizer_or_with_a_dtype_is_refused(model, model_dir, config):
    attention = model.config._attn_implementation
    with pytest.raises(
        TypeError, match=r"expected a tokenizer with a model object.*tokenizer=Auto"
    ):
        LLM(model, config)
    with pytest.raises(TypeError, match=r"got a LlamaForCausalLM with dtype torch.bfloat16"):
        LLM(model, config, tokenizer=str(model_dir), dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="expected a tokenizer of transformers or a directory, got"):
        LLM(model, config, tokenizer=3)
    with pytest.raises(TypeError, match="expected an EngineConfig or None, got "):
        LLM(model, {"context": 8})
    with pytest.raises(TypeError, match="expected a function of events, False or None, got True"):
        LLM(model, config, tokenizer=str(model_dir), progress=True)
    with pytest.raises(TypeError, match="expected a directory, or a causal language model"):
        LLM(torch.nn.Linear(2, 2), config, tokenizer=str(model_dir))
    assert model.config._attn_implementation == attention


def test_a_peft_model_is_unwrapped_unless_its_adapter_is_not_in_the_layers(
    model, model_dir, config
):
    with LLM(Wrapper(model), config, tokenizer=str(model_dir)) as own:
        assert own.model is model
    with pytest.raises(ModelRefused, match="got one of type PREFIX_TUNING"):
        LLM(Wrapper(model, prompts=True), config, tokenizer=str(model_dir))


def test_the_adapter_of_a_peft_model_is_the_default_beside_others(
    model, model_dir, config, tmp_path, llm
):
    peft = pytest.importorskip("peft", reason="peft, of the extra dev, makes the model")
    torch.manual_seed(0)
    lora = peft.LoraConfig(
        r=4, lora_alpha=64, target_modules="all-linear", init_lora_weights=False,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    whole = peft.get_peft_model(model, lora).eval()
    whole.save_pretrained(tmp_path)
    (without,) = llm.generate(["Hello"], SHORT)
    with LLM(whole, config, tokenizer=str(model_dir), adapters={"again": tmp_path}) as own:
        assert own.model is model and own.engine.adapters.names == ["default", "again"]
        named = replace(SHORT, adapter="again")
        first, second = own.generate(["Hello", "Hello"], [SHORT, named])
        assert first.text == second.text != without.text
    assert any(isinstance(each, peft.tuners.lora.LoraLayer) for each in whole.modules())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_the_start_is_shown_and_elsewhere_not(model_dir, config, monkeypatch):
    shown, silent = Terminal(), io.StringIO()
    monkeypatch.setattr("sys.stderr", shown)
    LLM(model_dir, config).close()
    text = shown.getvalue()
    assert text.startswith(f"loading {model_dir}\n") and "warmup" in text and "7/7" in text
    shown.truncate(0)
    LLM(model_dir, config, progress=False).close()
    monkeypatch.setattr("sys.stderr", silent)
    LLM(model_dir, config).close()
    assert (shown.getvalue().strip("\0"), silent.getvalue()) == ("", "")


@pytest.mark.parametrize(("given", "opened"), [(None, True), (False, False), ("here", "here")])
def test_an_llm_opens_the_default_store_by_default(model_dir, config, monkeypatch, given, opened):
    seen = []

    def noted(backend, store):
        seen.append(store)
        return real(backend, store)

    real = local.store_of
    monkeypatch.setattr(local, "store_of", noted)
    config = replace(config, store=given)
    if given == "here":
        with pytest.raises(ConfigError, match="with a store, got 'eager': leave one of them out"):
            LLM(model_dir, config)
    else:
        LLM(model_dir, config).close()
    assert seen == [opened]


@pytest.mark.slow  # test_inductor of the store starts a second process, too
@pytest.mark.usefixtures("compiler", "fresh_compiler")
def test_the_second_start_loads_what_the_first_stored(tmp_path, monkeypatch):
    model_dir = save_chat_model(tmp_path / "model", layers=1)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "before")
    small = EngineConfig(
        store=tmp_path / "store", max_seqs=1, max_tokens_per_step=8, block_size=8, max_graphs=2
    )
    answers = []
    for count in range(2):
        torch._dynamo.reset()
        with LLM(model_dir, small) as llm:
            steps = [r for r in llm.engine.warmup_report.results if r.name == "step"]
            assert [r.is_loaded for r in steps] == [bool(count)] * len(steps)
            answers.append(llm.generate(["Hello"], SHORT)[0].text)
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "before"
    assert answers[0] == answers[1]
