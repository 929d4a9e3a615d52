"""Random models of families that vLLM serves, as folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

_SIZES = {
    "vocab_size": 128,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_GROUPED = {
    **_SIZES,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 192,
    "max_position_embeddings": 512,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {
        **_GROUPED,
        "sliding_window": 40,
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 32,
    },
    "gpt_oss": {
        **_GROUPED,
        "sliding_window": 40,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "bloom": _SIZES,
}
"""Window and cap, window and sinks, ALiBi; grouped heads in the first two."""


def save(family: str, folder: Path) -> None:
    """A seeded model of two layers."""
    config = CONFIG_MAPPING[family](**FAMILIES[family])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            parameter.data.normal_()
    model.save_pretrained(folder)
