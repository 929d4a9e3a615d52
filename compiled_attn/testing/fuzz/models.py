"""Tiny random models for fuzzed engines, and their reference: dense attention in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from compiled_attn.models.adapters import Adapter, LoraWeight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["FAMILIES", "DenseReference", "adapters_of", "tiny_model"]

FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": 9},
    "gemma3_text": {
        "sliding_window": 9,
        "num_hidden_layers": 3,  # two sliding, one full
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 32,
    },
}
"""Config of each model family: full attention, sliding windows, and both."""

_SIZES = {
    "vocab_size": 1024,  # many, so that the best logits are close
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

_SCALES = {"embed_tokens": 0.02, "v_proj": 5.0, "o_proj": 5.0}
"""Factors of weights that make attention dominate, so that a wrong key changes the next token."""

Choices = Callable[[NDArray[np.float64], int | None, int, float], Sequence[int] | NDArray[np.int64]]


def tiny_model(family: str) -> PreTrainedModel:
    """Returns a small float32 model of `FAMILIES`, with the same weights each time."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[family](**{**_SIZES, **FAMILIES[family]})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    made: PreTrainedModel = model.eval().requires_grad_(False)
    for name, parameter in made.named_parameters():
        parameter *= next((scale for part, scale in _SCALES.items() if part in name), 1.0)
    return made


def most_likely(
    logits: NDArray[np.float64], seed: int | None, step: int, error: float
) -> NDArray[np.int64]:
    """Returns the token of the largest logit, then those within two errors of it."""
    tokens: NDArray[np.int64] = np.argsort(-logits, kind="stable")
    most = int((logits >= logits.max() - 2 * error).sum())
    return tokens[:most]


@cache
def adapters_of(
    family: str, count: int, choices: Choices = most_likely
) -> list[tuple[Adapter, DenseReference]]:
    """Returns LoRA adapters of `tiny_model`, each with its reference, whose weights are merged."""
    found = []
    for seed in range(1, 1 + count):
        model, generator = tiny_model(family), torch.Generator().manual_seed(seed)
        weights = {}
        for name, layer in model.named_modules():
            if name.endswith("_proj") and isinstance(layer, torch.nn.Linear):
                a = torch.randn(2, layer.in_features, generator=generator)
                b = torch.randn(layer.out_features, 2, generator=generator)
                weights[name] = LoraWeight(a, b, float(layer.weight.std()) / 2)
                layer.weight += weights[name].scale * b @ a
        found.append((Adapter(f"drawn {seed}", weights), DenseReference(model, choices)))
    return found


class DenseReference:
    """Logits of whole texts from dense attention: no cache, no engine, no batching effects.

    Args:
        model: a transformers model, which is copied.
        choices: see `Reference.choices`; by default the most likely token.
    """

    def __init__(self, model: PreTrainedModel, choices: Choices = most_likely) -> None:
        self._plain = copy.deepcopy(model)
        self._exact = copy.deepcopy(model).double()
        self.choices = choices

    @staticmethod
    @cache
    def of(family: str, choices: Choices = most_likely) -> DenseReference:
        """Returns the reference of `tiny_model`."""
        return DenseReference(tiny_model(family), choices)

    @torch.no_grad()
    def logits(self, texts: Sequence[Sequence[int]]) -> list[NDArray[np.float64]]:
        """Returns logits ``[len(text), vocab]`` of each text in float64."""
        rows = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int64)
        for row, text in zip(rows, texts, strict=True):
            row[: len(text)] = torch.tensor(text)
        # Padding follows the texts, so that causal attention never reads it.
        found = self._exact(input_ids=rows, use_cache=False).logits.numpy()
        return [each[: len(text)] for each, text in zip(found, texts, strict=True)]

    @torch.no_grad()
    def rounding(self, text: Sequence[int]) -> float:
        """Returns eight times the error of dense attention in the model's dtype."""
        plain = self._plain(input_ids=torch.tensor([text]), use_cache=False).logits[0]
        exact = self.logits([text])[0]
        scale = float(torch.finfo(plain.dtype).eps) * np.abs(exact).max()
        return 8 * max(float(np.abs(plain.double().numpy() - exact).max()), float(scale))
