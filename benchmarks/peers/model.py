"""The weights that all serve: a directory, or SmolLM2-135M's architecture with random weights."""

from __future__ import annotations

from pathlib import Path

import torch

SEED = 0
_RANGE = 0.08


def model_directory(given: Path | None, cache: Path) -> Path:
    """The given directory, or one in the cache that is made once."""
    folder = given or cache / f"smollm2-135m-seed{SEED}"
    if given is None and not (folder / "config.json").is_file():
        _save(folder)
    return folder


def _save(folder: Path) -> None:
    """Weights are random as those of `compiled_attn.models.default_model` and saved as bfloat16.

    So float32 and bfloat16 serve the same numbers.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=_RANGE,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(SEED)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
