"""peft as the oracle: its folders and its models give the tokens of its own `generate`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compiled_attn.engine import Engine, SamplingParams
from compiled_attn.errors import ConfigError
from compiled_attn.models.adapters import PeftAdapters
from tests.compiled_attn.engine.small import prompts_of, small_engine
from tests.compiled_attn.models.hf.families import small_model
from tests.compiled_attn.tiny import plain_generate, tiny_model

peft = pytest.importorskip("peft", reason="peft, of the extra dev, is the oracle")

NEW = 6
NO_PAGES = {"num_blocks": 400, "context": 64}


def lora(seed: int, **changes: object) -> peft.LoraConfig:
    torch.manual_seed(seed)
    given = {"r": (4, 8, 16)[seed % 3], "lora_alpha": 16 + seed, "target_modules": "all-linear"}
    given |= {"use_rslora": seed % 4 == 1, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**given | changes)


def wrapped(model: nn.Module, *configs: peft.LoraConfig) -> peft.PeftModel:
    """A model with adapters "a0", "a1" and so on, of which the first is active."""
    whole = peft.get_peft_model(model, configs[0], adapter_name="a0").eval()
    for number, config in enumerate(configs[1:], 1):
        whole.add_adapter(f"a{number}", config)
    return whole


def drawn_model(family: str) -> nn.Module:
    """A model whose layers count: with the usual embeddings Gemma repeats the last token."""
    model = small_model(family).eval()
    if family == "gemma3_text":
        model.get_input_embeddings().weight.data.mul_(0.02)
    return model


def sampling(name: str | None) -> SamplingParams:
    return SamplingParams(max_new_tokens=NEW, ignore_eos=True, adapter=name)


def served(engine: Engine, prompts: list[list[int]], names: list[str | None]) -> list[list[int]]:
    pairs = [(prompt, sampling(name)) for prompt in prompts for name in names]
    results = engine.generate(*zip(*pairs, strict=True), in_order=True)
    return [result.tokens for result in results]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_sixteen_adapters_of_one_step_give_the_tokens_of_generate_one_by_one(family, tmp_path):
    prompts = prompts_of(2, longest=20, vocab=100)
    whole = wrapped(drawn_model(family), *(lora(seed) for seed in range(16)))
    whole.save_pretrained(tmp_path)
    names = [f"a{number}" for number in range(16)]
    expected = []
    for prompt in prompts:
        with whole.disable_adapter():
            expected.append(plain_generate(whole, prompt, NEW))
        for name in names:
            whole.set_adapter(name)
            expected.append(plain_generate(whole, prompt, NEW))
    assert len({tuple(each) for each in expected}) > 16
    engine = small_engine(
        drawn_model(family), max_adapters=16, max_seqs=34, max_tokens_per_step=256, **NO_PAGES
    )
    for name in names:
        engine.adapters.add(name, tmp_path / name)
    assert served(engine, prompts, [None, *names]) == expected


def test_a_peft_model_is_unwrapped_and_its_active_adapter_is_the_default():
    prompts = prompts_of(3, longest=20)
    whole = wrapped(tiny_model(), lora(0), lora(1, target_modules=["q_proj"]))
    base = [plain_generate(tiny_model(), prompt, NEW) for prompt in prompts]
    expected = {}
    for name in ("a1", "a0"):
        whole.set_adapter(name)
        expected[name] = [plain_generate(whole, prompt, NEW) for prompt in prompts]
    layers = {name: type(each) for name, each in whole.named_modules()}
    engine = small_engine(whole, weights="plain", **NO_PAGES)
    assert engine.adapters.names == ["a0", "a1"] and engine.config.max_adapters == 2
    assert not any("_active_adapter" in vars(each) for each in whole.modules())
    assert served(engine, prompts, [None]) == expected["a0"] != base
    assert served(engine, prompts, ["a0"]) == expected["a0"]
    assert served(engine, prompts, ["a1"]) == expected["a1"] != expected["a0"]
    engine.adapters.remove("a0")
    assert served(engine, prompts, [None]) == base
    engine.executor.close()
    assert {name: type(each) for name, each in whole.named_modules()} == layers


def test_a_closed_engine_gives_a_peft_model_back_that_computes_as_before():
    whole, ids = wrapped(tiny_model(), lora(0)), torch.tensor([[1, 2, 3, 4]])
    attention = whole.config._attn_implementation
    with torch.no_grad():
        before = whole(ids).logits
    engine = small_engine(whole, **NO_PAGES)
    served(engine, prompts_of(1), [None])
    engine.executor.close()
    whole.set_attn_implementation(attention)
    with torch.no_grad():
        torch.testing.assert_close(whole(ids).logits, before)


def dora() -> peft.PeftModel:
    return wrapped(tiny_model(), lora(0, use_dora=True))


def merged() -> peft.PeftModel:
    whole = wrapped(tiny_model(), lora(0))
    whole.merge_adapter()
    return whole


def of_the_head() -> peft.PeftModel:
    return wrapped(tiny_model(), lora(0, target_modules=["q_proj", "lm_head"]))


def of_another_kind() -> peft.PeftModel:
    config = peft.IA3Config(task_type="CAUSAL_LM", init_ia3_weights=False)
    return peft.get_peft_model(tiny_model(), config).eval()


@pytest.mark.parametrize("make", [dora, merged, of_the_head, of_another_kind])
def test_what_has_no_slots_is_served_in_its_layers(make):
    whole, prompts = make(), prompts_of(2, longest=20)
    expected = [plain_generate(whole, prompt, NEW) for prompt in prompts]
    engine = small_engine(whole, **NO_PAGES)
    assert engine.adapters.names == [] and engine.config.max_adapters == 0
    assert served(engine, prompts, [None]) == expected
    with pytest.raises(ConfigError, match="name of an adapter"):
        engine.submit(prompts[0], sampling("a0"))


def test_anything_else_has_no_adapters_inside():
    assert PeftAdapters.of(tiny_model()) is None and PeftAdapters.of(None) is None
