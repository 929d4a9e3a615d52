"""Small random models of every family of `AutoModelForCausalLM`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FAMILIES: dict[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
_MOST_PARAMETERS = 5_000_000

# By what configurations call their sizes; a family gets those that it has.
_SIZES: dict[int | float | None, str] = {
    None: "bos_token_id eos_token_id",
    0: "pad_token_id",
    0.2: "initializer_range init_std",
    1: "topk_group n_group first_k_dense_replace max_window_layers n_shared_experts "
    "num_shared_experts moe_num_shared_experts",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_blocks "
    "num_encoder_layers num_decoder_layers num_key_value_heads swa_num_key_value_heads "
    "linear_num_key_heads num_experts_per_tok num_experts_per_token moe_topk moe_k index_n_heads "
    "zero_expert_num",
    4: "num_attention_heads n_head n_heads num_heads attention_heads num_kv_heads "
    "decoder_attention_heads encoder_attention_heads num_encoder_attention_heads "
    "num_decoder_attention_heads swa_num_attention_heads linear_num_heads linear_num_value_heads "
    "mamba_n_heads num_experts n_routed_experts num_local_experts moe_num_experts index_topk "
    "short_conv_kernel_size",
    8: "qk_rope_head_dim rotary_dim time_step_rank",
    9: "sliding_window sliding_window_size",
    16: "head_dim v_head_dim qk_nope_head_dim index_head_dim swa_head_dim d_head dim_head "
    "kv_channels attention_head_size query_pre_attn_scalar linear_head_dim linear_key_head_dim "
    "linear_value_head_dim state_size mamba_d_state mamba_chunk_size hidden_size_per_layer_input",
    32: "kv_lora_rank q_lora_rank moe_intermediate_size shared_expert_intermediate_size "
    "shared_intermediate_size shared_experts_intermediate_size expert_ffn_hidden_size "
    "attention_head_dim mamba_d_head global_head_dim",
    64: "hidden_size d_model n_embd emb_dim embedding_dim embedding_size word_embed_proj_dim "
    "attention_hidden_size lru_width hidden_size_global",
    96: "intermediate_size decoder_ffn_dim encoder_ffn_dim ffn_dim ffn_hidden_size dim_ff dff "
    "d_inner intermediate_size_mlp dense_intermediate_size",
    128: "vocab_size vocab_size_per_layer_input unpadded_vocab_size encoder_hash_byte_group_vocab",
    256: "max_position_embeddings n_positions n_ctx max_seq_len context_length "
    "max_target_positions",
}
_BY_NAME = {name: size for size, names in _SIZES.items() for name in names.split()}

_HYBRID = ["linear_attention", "full_attention"]
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
_TWO_KINDS = ["sliding_attention", "full_attention"]
_DECODER = {"is_decoder": True}
_DECODERS = (
    "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert "
    "roberta roberta-prelayernorm roformer xlm-roberta xlm-roberta-xl"
)
# Settings that a family needs besides its sizes, to fit together or to show its particularities.
_PARTICULAR: dict[str, dict[str, Any]] = {
    **{family: _DECODER for family in _DECODERS.split()},
    "bailing_hybrid": {"num_hidden_layers": 6},
    "blt": {"patch_in_forward": False},
    "cohere_compass_text": {
        "layer_types": _TWO_KINDS,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in _TWO_KINDS
        },
    },
    "cwm": _ENDS,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": {"num_key_value_heads": 4},
    "dots3_note_vision_encoder": {
        "mlp_layer_types": ["dense", "dense"],
        "adapter_in_dim": 64,
        "adapter_out_dim": 64,
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "emu3_text_model": _ENDS,
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3_text": {"layer_types": _TWO_KINDS},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": _TWO_KINDS * 2,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 8,
    },
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 4,
        }
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": _TWO_KINDS * 2,
        "per_layer_config": {1: {"head_dim": 32}, 3: {"head_dim": 32}},
    },
    "gemma4_unified_vision": {"mm_embed_dim": 64, "mm_posemb_size": 16, "output_proj_dims": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 9},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"expand": 2, "head_dim": 32, "n_groups": 2},
    "mllama_text_model": _ENDS,
    "modernbert-decoder": {
        **_ENDS,
        "cls_token_id": 1,
        "sep_token_id": 2,
        "local_attention": 18,
        "global_attn_every_n_layers": 2,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "n_groups": 2,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
    "phimoe": {"sliding_window": None},
    "qwen2": {"use_sliding_window": True, "layer_types": _TWO_KINDS},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {**_DECODER, "axial_pos_embds": False},
    "roc_bert": {
        **_DECODER,
        "shape_vocab_size": 16,
        "pronunciation_vocab_size": 16,
        "shape_embed_dim": 16,
        "pronunciation_embed_dim": 16,
    },
    "xmod": {**_DECODER, "default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "mamba_ngroups": 2,
    },
    "inkling2_loop_text": {
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1], "mamba_n_groups": 2},
    "granitemoehybrid": {"layer_types": _HYBRID, "mamba_n_groups": 2},
    "kimi_linear": {"layer_types": _HYBRID},
    "qwen3_next": {"layer_types": _HYBRID},
    "qwen3_5_text": {"layer_types": _HYBRID},
    "qwen3_5_moe_text": {"layer_types": _HYBRID},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "zaya": {"num_experts_per_tok": 1},
}


class TooLargeError(ValueError):
    """A family needs other settings to be small."""


def small_model(family: str, *, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A random float32 model of a family, seeded, in eval mode with eager attention.

    Raises:
        TooLargeError: no setting here makes it small.
        Exception: whatever transformers raises of a configuration.
    """
    config = small_config(family, **settings)
    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if count > _MOST_PARAMETERS:
        raise TooLargeError(f"{count / 1e6:.0f} million parameters: add settings in {__file__}")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if "sink" in name:  # they begin at zero
            parameter.data.normal_()
    model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)


def small_config(family: str, **settings: Any) -> PreTrainedConfig:
    """Its configuration; ``settings`` go over those that are chosen here."""
    kind = CONFIG_MAPPING[family]
    return kind(**{**_settings(kind), **settings})


def text_parts() -> dict[str, list[str]]:
    """Families that are the text part of other models by default, with the names of these."""
    parts: dict[str, list[str]] = {}
    for name in CONFIG_MAPPING:
        kind = CONFIG_MAPPING[name]
        if name in FAMILIES or not getattr(kind, "sub_configs", None):
            continue
        try:
            config = kind()
            text = config.get_text_config(decoder=True)
        except Exception:  # nougat names a part that does not exist
            continue
        if text is not config and text.model_type in FAMILIES:
            parts.setdefault(text.model_type, []).append(name)
    return dict(sorted(parts.items()))


def _settings(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    known = {field.name for field in dataclasses.fields(kind)}
    chosen: dict[str, Any] = {name: size for name, size in _BY_NAME.items() if name in known}
    particular = dict(_PARTICULAR.get(kind.model_type, {}))
    if "qk_rope_head_dim" in known:  # latent attention: no sizes that follow from others
        chosen.pop("head_dim", None)
        chosen["num_key_value_heads"] = 4
    for name in kind.sub_configs:
        own = particular.pop(name, {})
        part = CONFIG_MAPPING[own["model_type"]] if "model_type" in own else _part(kind, name)
        if name in known and part is not None:
            chosen[name] = {"model_type": part.model_type, **_settings(part), **own}
    return {**chosen, **particular}


def _part(kind: type[PreTrainedConfig], name: str) -> type[PreTrainedConfig] | None:
    """The configuration of a part of a model: as declared, or as it is by default."""
    declared = kind.sub_configs[name]
    part = declared if getattr(declared, "model_type", "") else type(getattr(kind(), name, None))
    return part if issubclass(part, PreTrainedConfig) else None
