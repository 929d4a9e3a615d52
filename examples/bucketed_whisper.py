"""An encoder-decoder with `graphs.bucketed`: transcribe any number of clips, compile nothing late.

    python examples/bucketed_whisper.py [--store DIR] [--backend eager]

Whisper of transformers with drawn weights. The encoder gets clips of fixed length, the decoder gets
what the encoder returned (a `ModelOutput`) next to the tokens so far. With `--store` the second
start loads its graphs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import WhisperConfig, WhisperForConditionalGeneration

import graphs
from graphs.store import ArtifactStore, StoredInductor

BATCH, TOKENS = (1, 4), (2, 16)  # least and most


def small_whisper() -> WhisperForConditionalGeneration:
    torch.manual_seed(0)
    config = WhisperConfig(
        **{
            "d_model": 64,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
        },
        **{"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 128},
        **{"max_source_positions": 50, "max_target_positions": 32, "vocab_size": 100},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3},
    )
    return WhisperForConditionalGeneration(config).eval().requires_grad_(False)


def transcribe(encode: Callable[..., Any], decode: Callable[..., Any], clips: Tensor) -> Tensor:
    """Choose the likeliest token until there are as many as the decoder takes."""
    heard = encode(input_features=clips)
    tokens = torch.full((len(clips), TOKENS[0]), 3)
    while tokens.shape[1] < TOKENS[1]:
        step = decode(encoder_outputs=heard, decoder_input_ids=tokens, use_cache=False)
        tokens = torch.cat([tokens, step.logits[:, -1:].argmax(-1)], 1)
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--store", help="folder for compiled graphs")
    options = parser.parse_args()
    backend = StoredInductor(ArtifactStore(options.store)) if options.store else options.backend
    model = small_whisper()
    clips = torch.randn(3, 80, 100)

    with torch.no_grad():
        heard = model.get_encoder()(input_features=clips)
    tokens = torch.full((3, 5), 3)
    example = {"encoder_outputs": heard, "decoder_input_ids": tokens, "use_cache": False}
    axes = {"encoder_outputs": {0: "batch"}, "decoder_input_ids": ("batch", "tokens")}
    encode = graphs.bucketed(
        model.get_encoder(), {"input_features": clips}, batch=BATCH, backend=backend
    )
    decode = graphs.bucketed(model, example, axes=axes, batch=BATCH, tokens=TOKENS, backend=backend)
    report = graphs.WarmupGroup(encode, decode).warmup()
    print(f"start: {report.elapsed_seconds:.1f} s, {report.compiles} compiles, {report}")

    with graphs.no_compile() as sentinel, torch.no_grad():
        for count in (1, 2, 3, 4):
            clips = torch.randn(count, 80, 100)
            tokens = transcribe(encode, decode, clips)
            assert torch.equal(tokens, transcribe(model.get_encoder(), model, clips))
            print(f"{count} clips: {tokens[0].tolist()}")
    print(f"{sentinel.compiles} compiles while serving")


if __name__ == "__main__":
    main()
