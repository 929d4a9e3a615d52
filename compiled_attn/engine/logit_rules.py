"""Rules that change logits before sampling: grammars, biases, `min_tokens`, penalties.

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

__all__ = ["LogitRules", "SeenTokens", "shaped"]

Ints = NDArray[np.int64]

_NOTHING = np.zeros(0, np.int64), np.zeros(0, np.int64)


class SeenTokens:
    """Counts the distinct tokens of a growing text incrementally."""

    def __init__(self, prompt_len: int) -> None:
        self._prompt_len = prompt_len
        self._counted = -1  # tokens of the text; -1: none yet
        self._place: dict[int, int] = {}
        self._ids = self._counts = np.zeros(0, np.int64)

    def of(self, text: Sequence[int]) -> tuple[Ints, Ints]:
        """Returns ids ``[n]`` of the tokens of a text, and how often each was generated: views.

        Args:
            text: the text of the previous call, possibly with more tokens; or a shorter one, after
                a rollback.
        """
        counted, self._counted = self._counted, -1  # an exception leaves it to be counted again
        if not 0 <= counted <= len(text):
            self._count_all(np.array(text, np.int64))
        else:
            for token in text[counted:]:
                self._count(token)
        self._counted = len(text)
        seen = len(self._place)
        return self._ids[:seen], self._counts[:seen]

    def _count_all(self, text: Ints) -> None:
        ids = np.unique(text)
        generated = np.searchsorted(ids, text[self._prompt_len :])
        self._place = {token: at for at, token in enumerate(ids.tolist())}
        self._ids, self._counts = ids, np.bincount(generated, minlength=len(ids))

    def _count(self, token: int) -> None:
        at = self._place.get(token)
        if at is None:
            at = self._place[token] = len(self._place)
            if at == len(self._ids):
                room = np.zeros(max(at, 64), np.int64)
                self._ids = np.concatenate([self._ids, room])
                self._counts = np.concatenate([self._counts, room])
            self._ids[at] = token
        self._counts[at] += 1


class LogitRules:
    """The logit changes of one request, as arrays that are made once."""

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
        banned = [end for end in ends if end >= 0] if params.min_tokens else []
        self.ends = np.array(sorted(banned), np.int64)
        self.seen = SeenTokens(prompt_len)

    def banned_ends(self, text: Sequence[int], vocab: int) -> NDArray[np.int64]:
        """Returns the end tokens that may not follow a text yet."""
        is_short = len(text) - self._prompt_len < self.params.min_tokens
        return self.ends[self.ends < vocab] if is_short else self.ends[:0]


def shaped(
    logits: Tensor, rows: Sequence[int], rules: Sequence[LogitRules], texts: Sequence[Sequence[int]]
) -> Tensor:
    """Applies the rules of some rows to their logits, all at once.

    Args:
        logits: ``[R, vocab]``, any float dtype; not changed.
        rows: n of them.
        rules: n, one for each row.
        texts: n, the tokens of each row so far, prompt included.

    Returns:
        ``[n, vocab]``, float32, or float64 where the logits are.
    """
    at = torch.tensor(rows, device=logits.device)
    made = logits.index_select(0, at).to(torch.promote_types(logits.dtype, torch.float32))
    constrain(made, [rule.constraint for rule in rules], texts)
    pairs = [*zip(rules, texts, strict=True)]
    made[_index([rule.bias_ids for rule in rules], made)] += torch.from_numpy(
        np.concatenate([rule.biases for rule in rules])
    ).to(made)
    made[_index([rule.banned_ends(text, made.shape[1]) for rule, text in pairs], made)] = -torch.inf
    seen = [rule.seen.of(text) if rule.params.penalises else _NOTHING for rule, text in pairs]
    index = _index([ids for ids, _ in seen], made)
    counts = torch.from_numpy(np.concatenate([counts for _, counts in seen])).to(made)
    made[index] = _penalised(made[index], counts, [rule.params for rule in rules], index[0])
    return made


def _penalised(
    values: Tensor, counts: Tensor, params: Sequence[SamplingParams], rows: Tensor
) -> Tensor:
    """Penalises logits ``[n]`` of seen tokens, generated ``counts [n]`` times, in ``rows``."""
    repetition, presence, frequency = (
        torch.tensor([getattr(each, name) for each in params]).to(values)[rows]
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
    )
    values = torch.where(values > 0, values / repetition, values * repetition)
    return values - frequency * counts - presence * (counts > 0)


def _index(ids: Sequence[NDArray[np.int64]], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the ids of each row, one row after the other."""
    rows = np.repeat(np.arange(len(ids)), [len(each) for each in ids])
    at, tokens = (torch.from_numpy(each).to(logits.device) for each in (rows, np.concatenate(ids)))
    return at, tokens
