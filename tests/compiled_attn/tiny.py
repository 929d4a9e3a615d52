"""Tiny random models of several families, and plain Hugging Face generation to compare with."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

_SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 9},
    "gemma2": {
        "sliding_window": 9,
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 3.0,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
    },
    "gemma3_text": {
        "sliding_window": 9,
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3": {"head_dim": 16},
    "gpt_oss": {
        "sliding_window": 9,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}


def tiny_model(family: str = "llama", seed: int = 0, **sizes: int) -> PreTrainedModel:
    """A two-layer model of a family, float32, seeded, without an end-of-sequence token."""
    config = CONFIG_MAPPING[family](**{**_SIZES, **FAMILIES.get(family, {}), **sizes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            parameter.data.normal_()
    return model.requires_grad_(False)


def plain_generate(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of `generate`, with eager attention."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=count,
            do_sample=False,
        )
    finally:
        model.set_attn_implementation(before)
    return out[0, len(prompt) :].tolist()
