"""The token at a place of the running sum of a row's weights, the largest first.

Bins of logits tell where a sum is reached, and only that bin is sorted. Of a long row only the head
is looked at so: of the rest the sum is enough, as long as nothing falls into it. That is taken in
float32, and a token counts where the least and the greatest sum that it may be give the same.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from compiled_attn.engine.sampling import SamplingParams

__all__ = ["RunningSum"]

_BINS = 2048
_NATS = 40.0  # what is less likely by this factor of e shares the last bin
# Of a sum of exponentials in float32, relative where the exponents are above -40 (of which each of
# three roundings is 2**-24, times 40), and absolute, of a million others.
_ERROR, _LEAST = 2.0**-16, 1e-11
_COLDEST = 1e-30  # whose inverse is a float32


class _InTheRest(Exception):
    """What is looked for is not in the head."""


class RunningSum:
    """Draws a token of one row after the other; its arrays serve all of them.

    Args:
        vocab: tokens of a row.
    """

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._exact = [np.empty(vocab) for _ in range(3)]
        self._all_bins = np.empty(vocab, np.int64)
        self._rough = torch.empty(vocab)  # whose operations take several threads

    def token(
        self,
        values: NDArray[np.floating],
        head: NDArray[np.int64],
        params: SamplingParams,
        number: float,
    ) -> int:
        """The token of a row at a uniform place of its running sum.

        Args:
            values: ``[vocab]``, its logits.
            head: ids of the largest of them, ascending; those with none are looked at whole.
            params: how it is drawn.
            number: the place, in [0, 1).
        """
        if len(head) and params.temperature > _COLDEST:
            rest = self._sum_of_rest(values, head, params.temperature)
            self._begin(values[head], params.temperature)
            bounds = (rest * (1 - _ERROR), rest * (1 + _ERROR) + _LEAST)
            try:
                low, high = (self._drawn(params, number, bound) for bound in bounds)
                if low == high:
                    return int(head[low])
            except _InTheRest:
                pass
        self._begin(values, params.temperature)
        return self._drawn(params, number, 0.0)

    def _sum_of_rest(
        self, values: NDArray[np.floating], head: NDArray[np.int64], temperature: float
    ) -> float:
        rough, top = self._rough, float(values[head].max())
        torch.sub(torch.from_numpy(values), top, out=rough)
        rough.mul_(1 / temperature).exp_()
        rough.numpy()[head] = 0
        return float(rough.sum())

    def _begin(self, values: NDArray[np.floating], temperature: float) -> None:
        """The next row, of logits ``[n]``; its weights are ``exp(values / temperature)``, the
        largest of which is made 1.
        """
        self._count = len(values)
        scaled, weights, places = (array[: self._count] for array in self._exact)
        bins = self._all_bins[: self._count]
        values = values.astype(np.float64)
        with np.errstate(over="ignore"):
            np.divide(values - values.max(), temperature, out=scaled)
        np.exp(scaled, out=weights)
        np.multiply(scaled, -_BINS / _NATS, out=places)
        np.minimum(places, _BINS - 1, out=places)
        np.copyto(bins, places, casting="unsafe")
        self._scaled, self._weights, self._bins = scaled, weights, bins
        self._sums = np.bincount(bins, weights, _BINS).cumsum()
        self._here = float(self._sums[-1])

    def _drawn(self, params: SamplingParams, number: float, rest: float) -> int:
        """The place of the token among the values, where all others together weigh ``rest``."""
        self._total = self._here + rest
        if 0 < params.top_k < self._vocab:
            self._cut_behind(params.top_k)
        if params.top_p < 1:
            self._cut_at(params.top_p * self._total)
        if params.min_p:
            # Of the most likely, which weighs 1.
            self._cut_behind(int(np.count_nonzero(self._weights >= params.min_p)))
        return self._at(number * self._total)

    def _at(self, target: float) -> int:
        """The first token at which the sum is above ``target``, else the last that adds to it."""
        if target >= self._here < self._total:
            raise _InTheRest
        last = int(np.searchsorted(self._sums, min(self._total, self._here)))
        inside = min(int(np.searchsorted(self._sums, target, "right")), last)
        tokens, sums = self._inside(inside)
        end = int(np.searchsorted(sums, sums[-1]))
        return int(tokens[min(int(np.searchsorted(sums, target, "right")), end)])

    def _cut_at(self, target: float) -> None:
        """Leaves the tokens up to the first at which the sum reaches ``target``."""
        if target > self._here < self._total:
            raise _InTheRest
        inside = min(int(np.searchsorted(self._sums, target)), _BINS - 1)
        sums = self._inside(inside)[1]
        self._cut(sums, int(np.searchsorted(sums, target)))

    def _cut_behind(self, count: int) -> None:
        """Leaves the first ``count`` tokens."""
        if count >= self._count:
            if self._here < self._total:
                raise _InTheRest
            return
        counts = np.bincount(self._bins, minlength=_BINS).cumsum()
        inside = int(np.searchsorted(counts, count))
        before = int(counts[inside - 1]) if inside else 0
        self._cut(self._inside(inside)[1], count - 1 - before)

    def _cut(self, sums: NDArray[np.float64], place: int) -> None:
        self._total = min(self._total, float(sums[min(place, len(sums) - 1)]))

    def _inside(self, inside: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The tokens of a bin in order, and the running sum at each, of what is left."""
        members = np.flatnonzero(self._bins == inside)
        tokens = members[np.argsort(-self._scaled[members], kind="stable")]
        before = self._sums[inside - 1] if inside else 0.0
        return tokens, np.minimum(before + self._weights[tokens].cumsum(), self._total)
