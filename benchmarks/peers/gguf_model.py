"""The weights of a directory as one GGUF file, which llama.cpp serves: of a Llama alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

KINDS = {"float32": "F32", "bfloat16": "BF16", "q4_0": "Q4_0", "q4_1": "Q4_1", "q8_0": "Q8_0"}
"""Types of the matrices in a file, by the name of a dtype of the contest."""

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_file(model: Path, kind: str, cache: Path) -> Path:
    """Returns the file in the cache, written once; its tokens have no text.

    Embeddings and output head are 8 bits where the others are 4, as in most files.

    Raises:
        ValueError: the model is not a Llama.
    """
    path = cache / f"{model.name}-{kind}.gguf"
    if not path.is_file():
        made = path.with_suffix(f".{os.getpid()}")
        try:
            _write(model, KINDS[kind], made)
            made.rename(path)
        finally:
            made.unlink(missing_ok=True)
    return path


def _write(model: Path, kind: str, path: Path) -> None:
    import gguf
    import torch
    from safetensors import safe_open

    config = json.loads((model / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"expected a Llama to write as GGUF, got {config['model_type']}: {model}")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    rope = config.get("rope_parameters") or config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for part in sorted(model.glob("*.safetensors")):
        with safe_open(part, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                weight = tensors.get_tensor(name).to(torch.float32).numpy()
                if name.endswith(("q_proj.weight", "k_proj.weight")):
                    weight = _interleaved(weight, heads if "q_proj" in name else kv_heads)
                _add(writer, _renamed(name), weight, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: object, name: str, weight: NDArray[np.float32], kind: str) -> None:
    import gguf

    if weight.ndim == 1:
        kind = "F32"
    elif kind.startswith("Q4") and name.split(".")[0] in ("token_embd", "output"):
        kind = "Q8_0"
    raw = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quants.quantize(weight, raw), raw_dtype=raw)  # type: ignore[attr-defined]


def _renamed(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.weight"


def _interleaved(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Halves of a head become pairs: llama.cpp rotates neighbours."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
