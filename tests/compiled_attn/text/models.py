"""Small tokenizers of both kinds, and a small model that has one."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END, USER, MODEL = "<end>", "<user>", "<model>"
SPECIAL = [END, USER, MODEL]
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ raise_exception('no system messages') }}{% endif %}"
    "{{ '<' + message['role'] + '>' + message['content'] + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<model>' }}{% endif %}"
)


def byte_level(vocab: int = 256) -> Tokenizer:
    """A token for each byte, and some of two: halves of characters too."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    numbers = {letter: number for number, letter in enumerate(letters)}
    merges = [("t", "h"), ("Ġ", "a"), ("ð", "Ł"), ("ä", "½"), ("o", "n"), ("Ċ", "Ċ")]
    numbers |= {a + b: vocab + at for at, (a, b) in enumerate(merges)}
    made = Tokenizer(models.BPE(numbers, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def byte_fallback() -> Tokenizer:
    """Words after a sign for the space, and bytes for the rest, like SentencePiece."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b"]
    made = Tokenizer(
        models.BPE(
            {word: number for number, word in enumerate(words)},
            [("▁", "a"), ("▁", "b")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return made


def save_tokenizer(made: Tokenizer, folder: Path, template: str | None = TEMPLATE) -> None:
    made.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)
    fast.chat_template = template
    fast.save_pretrained(folder)


def save_model(folder: Path, vocab: int = 272, end: int | None = None, *, layers: int = 2) -> None:
    """A Llama with narrow layers; the caller seeds torch."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=end,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def save_chat_model(folder: Path, end: int | None = None, *, layers: int = 2) -> Path:
    """A model with random weights of seed 0, a byte-level tokenizer and a chat template."""
    torch.manual_seed(0)
    save_model(folder, end=end, layers=layers)
    save_tokenizer(byte_level(), folder)
    return folder
