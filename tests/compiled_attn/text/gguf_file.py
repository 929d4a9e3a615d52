"""A small GGUF file, as llama.cpp writes one."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from tests.compiled_attn.text.models import SPECIAL, TEMPLATE, byte_level

WIDTH, LAYERS, HEADS, INNER = 64, 2, 4, 96


def write_gguf(path: Path, *, missing: str = "", kind: str = "Q8_0") -> None:
    """A Llama with random weights, some of them in blocks, and a byte-level tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    _add_tokenizer(writer)
    for name, values in _weights(np.random.default_rng(0)).items():
        if name != missing:
            _add(writer, name, values, gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    made = byte_level()
    tokens = [made.id_to_token(number) for number in range(made.get_vocab_size())]
    merges = ["t h", "Ġ a", "ð Ł", "ä ½", "o n", "Ċ Ċ"]
    kinds = [gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.CONTROL] * len(SPECIAL)
    writer.add_vocab_size(len(kinds))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*tokens, *SPECIAL])
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(len(tokens))
    writer.add_chat_template(TEMPLATE)


def _weights(draw: np.random.Generator) -> dict[str, np.ndarray]:
    vocab = byte_level().get_vocab_size() + len(SPECIAL)
    shapes = {"token_embd": (vocab, WIDTH), "output_norm": (WIDTH,)}
    for layer in range(LAYERS):
        part = {f"attn_{each}": (WIDTH, WIDTH) for each in ("q", "k", "v", "output")}
        part |= {"ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)}
        part |= {"attn_norm": (WIDTH,), "ffn_norm": (WIDTH,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in part.items()}
    return {
        f"{name}.weight": draw.normal(0, 0.3, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def _add(
    writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: gguf.GGMLQuantizationType
) -> None:
    if "ffn_up" in name or "attn_v" in name or "attn_q" in name:
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, values)
