"""Adapters as peft saves them: what is read, and what is refused in one line."""

from __future__ import annotations

import json

import pytest
import torch

from compiled_attn.errors import AdapterError
from compiled_attn.models.adapters import adapter_of, read_adapter
from tests.compiled_attn.models.adapters.lora import saved, settings, tensors
from tests.compiled_attn.tiny import tiny_model

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def parts():
    return tensors(tiny_model(), ("q_proj", "v_proj"), 4, 0)


def test_a_folder_is_read_with_its_scale(tmp_path, parts):
    adapter = read_adapter(saved(tmp_path / "one", parts, settings(4)))
    assert (len(adapter.weights), adapter.rank) == (4, 4)
    weight = adapter.weights[Q]
    assert torch.equal(weight.a, parts[f"base_model.model.{Q}.lora_A.weight"])
    assert torch.equal(weight.b, parts[f"base_model.model.{Q}.lora_B.weight"])
    assert weight.scale == 8 / 4


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({"use_rslora": True}, 8 / 4**0.5),
        ({"alpha_pattern": {"layers.0.self_attn.q_proj": 3}}, 3 / 4),
        ({"alpha_pattern": {".*q_proj": 3, "q_proj": 5}}, 3 / 4),
        ({"alpha_pattern": {"other": 3}}, 8 / 4),
        ({"r": 9, "rank_pattern": {"q_proj|v_proj": 4}, "lora_alpha": 8}, 8 / 4),
    ],
)
def test_scales_follow_the_settings(parts, changes, scale):
    assert adapter_of("it", settings(4, **changes), parts).weights[Q].scale == scale


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'LORA', got 'IA3'"),
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
        ({"init_lora_weights": "pissa_niter_4"}, "changed the base model, too"),
        ({"r": 8}, "expected rank 8 of .*q_proj by its configuration, got 4"),
        ({"lora_alpha": "much"}, "a number as lora_alpha, got 'much'"),
        ({"lora_alpha": float("nan")}, "a number as lora_alpha"),
        ({"lora_alpha": 10**400}, "a number as lora_alpha"),
        ({"lora_alpha": 1e300}, "a number as lora_alpha"),
        ({"init_lora_weights": "lora_ga"}, "changed the base model, too"),
        ({"arrow_config": {"top_k": 2}}, "arrow_config="),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora="),
        ({"rank_pattern": ["q_proj"]}, r"expected rank_pattern as an object.*got \['q_proj'\]"),
        ({"alpha_pattern": {"(": 3}}, "expected alpha_pattern as an object of patterns"),
    ],
)
def test_settings_that_are_not_served_are_named(parts, changes, message):
    with pytest.raises(AdapterError, match=message):
        adapter_of("it", settings(4, **changes), parts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.clear(), "got no tensor"),
        (lambda p: p.pop(f"base_model.model.{Q}.lora_B.weight"), "got lora_A only"),
        (lambda p: p.update({"base_model.model.x.lora_embedding_A": torch.ones(2)}), "embedding_A"),
        (lambda p: p.update({"x.lora_A.weight": torch.ones(4, 2)}), "'x.lora_A.weight'"),
        (
            lambda p: p.update({f"base_model.model.{Q}.lora_B.weight": torch.ones(64, 3)}),
            r"\[4, 64\] and \[64, 3\]",
        ),
        (
            lambda p: p.update({f"base_model.model.{Q}.lora_A.weight": torch.ones(4, 64).int()}),
            "float weights",
        ),
    ],
)
def test_tensors_that_do_not_fit_together_are_named(parts, change, message):
    changed = dict(parts)
    change(changed)
    with pytest.raises(AdapterError, match=message):
        adapter_of("it", settings(4), changed)


def test_folders_that_are_none_are_refused_in_one_line(tmp_path, parts):
    whole = saved(tmp_path / "whole", parts, settings(4))
    with pytest.raises(AdapterError, match=r"expected a directory with adapter_config\.json"):
        read_adapter(tmp_path / "missing")
    for path in ("~nobody_of_this_name/it", "a" * 5000, "a\0b", ""):
        with pytest.raises(AdapterError, match=r"expected a directory with adapter_config\.json"):
            read_adapter(path)
    (whole / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(AdapterError, match=r"adapter_config\.json: cannot be read"):
        read_adapter(whole)
    (whole / "adapter_config.json").write_text("{")
    with pytest.raises(AdapterError, match=r"adapter_config\.json: cannot be read"):
        read_adapter(whole)
    (whole / "adapter_config.json").write_text("[]")
    with pytest.raises(AdapterError, match="it holds no object"):
        read_adapter(whole)
    (whole / "adapter_config.json").write_text(json.dumps(settings(4)))
    file = whole / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors: cannot be read") as error:
        read_adapter(whole)
    assert "\n" not in str(error.value)
    file.rename(whole / "adapter_model.bin")
    with pytest.raises(AdapterError, match="other files can run code"):
        read_adapter(whole)
