"""Rules that change logits before a token is taken: grammars, biases, penalties, ends that wait.

The order is that of vLLM: the mask of a grammar, biases and `min_tokens`, then the penalties.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_attn.engine.constraint import Constraint, constrain
from compiled_attn.engine.sampling import SamplingParams
from compiled_attn.engine.seen_tokens import SeenTokens

__all__ = ["LogitRules", "shaped"]

_NOTHING = np.zeros(0, np.int64), np.zeros(0, np.int64)


class LogitRules:
    """What the settings of one request do to its logits, as arrays that are made once.

    Args:
        params: its settings.
        prompt_len: tokens of its prompt.
        ends: tokens that end it.
        constraint: its grammar, if it has one.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_len: int,
        ends: Collection[int],
        constraint: Constraint | None = None,
    ) -> None:
        self.params = params
        self.constraint = constraint
        self._prompt_len = prompt_len
        biases = dict(params.logit_bias)
        self.bias_ids = np.array([*biases], np.int64)
        self.biases = np.array([*biases.values()], np.float64)
        held = [end for end in ends if end >= 0] if params.min_tokens else []
        self.ends = np.array(sorted(held), np.int64)
        self.seen = SeenTokens(prompt_len)

    def held_ends(self, text: Sequence[int], vocab: int) -> NDArray[np.int64]:
        """Tokens that may not follow a text, as it is too short."""
        is_short = len(text) - self._prompt_len < self.params.min_tokens
        return self.ends[self.ends < vocab] if is_short else self.ends[:0]


def shaped(
    logits: Tensor,
    rows: Sequence[int],
    rules: Sequence[LogitRules],
    texts: Sequence[Sequence[int]],
) -> Tensor:
    """Some rows of logits as the rules of each want them, all at once.

    Args:
        logits: ``[R, vocab]``, any float dtype; not changed.
        rows: n of them.
        rules: n, one for each row.
        texts: of each row the tokens so far, prompt included.

    Returns:
        ``[n, vocab]``, float32, or float64 where the logits are.
    """
    at = torch.tensor(rows, device=logits.device)
    made = logits.index_select(0, at).to(torch.promote_types(logits.dtype, torch.float32))
    constrain(made, [rule.constraint for rule in rules], texts)
    pairs = [*zip(rules, texts, strict=True)]
    made[_places([rule.bias_ids for rule in rules], made)] += torch.from_numpy(
        np.concatenate([rule.biases for rule in rules])
    ).to(made)
    made[_places([rule.held_ends(text, made.shape[1]) for rule, text in pairs], made)] = -torch.inf
    seen = [rule.seen.of(text) if rule.params.penalises else _NOTHING for rule, text in pairs]
    places = _places([ids for ids, _ in seen], made)
    counts = torch.from_numpy(np.concatenate([counts for _, counts in seen])).to(made)
    made[places] = _penalised(made[places], counts, [rule.params for rule in rules], places[0])
    return made


def _penalised(
    values: Tensor, counts: Tensor, params: Sequence[SamplingParams], rows: Tensor
) -> Tensor:
    """Logits ``[n]`` of tokens that were seen, and generated ``counts [n]`` times, in ``rows``."""
    repetition, presence, frequency = (
        torch.tensor([getattr(each, name) for each in params]).to(values)[rows]
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
    )
    values = torch.where(values > 0, values / repetition, values * repetition)
    return values - frequency * counts - presence * (counts > 0)


def _places(ids: Sequence[NDArray[np.int64]], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and tokens of the ids of each row, one row behind the other."""
    rows = np.repeat(np.arange(len(ids)), [len(each) for each in ids])
    at, tokens = (torch.from_numpy(each).to(logits.device) for each in (rows, np.concatenate(ids)))
    return at, tokens
