"""The most likely tokens of rows of logits, found without sorting the rows.

In order, equal logits stand by their ids, the lower one first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["RankedRows", "RunningSum"]

_FEW = 1024  # tokens that are taken out of a row at once, at most
_CHUNK = 32
_WIDE = 64 * _CHUNK  # vocabularies below it are looked at whole
_LOW = 0xFFFFFFFF
_BINS = 2048
_NATS = 40.0  # what is less likely by this factor of e shares the last bin


class RankedRows:
    """Rows of logits by the maxima of chunks of 32, which are found in one pass over the rows.

    The k largest of a row are in those chunks whose maxima are not below the k-th largest maximum.
    Chunk ``j`` of ``C`` holds the tokens ``j, j + C, ...``, so that the pass is one of plain
    vector maxima; tokens behind the last whole chunk are chunks of their own.

    Args:
        logits: ``[R, vocab]``, any float dtype.
    """

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self.vocab = logits.shape[1]
        self._chunks, self._maxima = 0, logits
        if self.vocab >= _WIDE:
            self._chunks = self.vocab // _CHUNK
            whole = self._chunks * _CHUNK
            maxima = logits[:, :whole].unflatten(1, (_CHUNK, self._chunks)).amax(1)
            self._maxima = torch.cat([maxima, logits[:, whole:]], 1)

    def best(self) -> tuple[Tensor, Tensor]:
        """The largest of each row, NaN where it has one, and its token: ``[R]`` each."""
        best, tokens = self._maxima.max(-1)
        if self._chunks:
            members = self._members(tokens[:, None])
            is_best = self._logits.gather(1, members) == best[:, None]
            tokens = members.gather(1, is_best.int().argmax(1, keepdim=True))[:, 0]
            tied = (self._maxima == best[:, None]).sum(1) > 1
            if tied.any():
                tokens[tied] = self._logits[tied].max(-1).indices
        return best, tokens

    def is_few(self, top_k: int) -> bool:
        """Whether `first` can take out that many (0: all)."""
        return self._logits.dtype != torch.float64 and 0 < (top_k or self.vocab) <= _FEW

    def first(
        self, rows: NDArray[np.int64], count: int
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Values and ids ``[n, count]`` of the first tokens of each of ``rows [n]``, ascending."""
        at = torch.from_numpy(rows).to(self._logits.device)
        count = min(count, self.vocab)
        is_all = len(rows) == len(self._logits)
        if not self._chunks:
            keys = _keys(self._logits if is_all else self._logits[at], np.arange(self.vocab))
        else:
            maxima = (self._maxima if is_all else self._maxima[at]).float()
            # With all whose maximum equals that of the last: in each may be a token of a lower id.
            largest, chunks = maxima.topk(min(count, maxima.shape[1]), sorted=False)
            wanted = int((maxima >= largest.amin(1, keepdim=True)).sum(1).max())
            if wanted > 2 * count + _FEW and len(rows) > 1:  # one row of equals is not for all
                each = [self.first(rows[n : n + 1], count) for n in range(len(rows))]
                return np.concatenate([v for v, _ in each]), np.concatenate([i for _, i in each])
            if wanted > chunks.shape[1]:
                kept = _largest(_keys(maxima, np.arange(maxima.shape[1])), wanted)
                chunks = torch.from_numpy(_ids(kept)).to(at.device)
            members = self._members(chunks[:, :, None]).flatten(1)
            found = self._take(at, members)
            # Chunks of one are told as often as the others have members: only the first counts.
            keys = _keys(found, members.cpu().numpy())
            alone = np.repeat(chunks.cpu().numpy() >= self._chunks, _CHUNK, axis=1)
            alone[:, ::_CHUNK] = False
            keys[alone] = np.iinfo(np.int64).min
        first = np.sort(_largest(keys, count), axis=1)[:, ::-1]
        ids = _ids(first)
        values = self._take(at, torch.from_numpy(ids).to(at.device))
        return values.double().cpu().numpy(), ids

    def row(self, row: int) -> NDArray[np.float64]:
        """The logits ``[vocab]`` of a row."""
        values: NDArray[np.float64] = self._logits[row].double().cpu().numpy()
        return values

    def _take(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """The logits of ``tokens [n, m]`` of each of ``rows [n]``, none of which is there twice."""
        if len(rows) == len(self._logits):  # all, in order
            return self._logits.gather(1, tokens)
        return torch.take(self._logits, tokens + rows[:, None] * self.vocab)

    def _members(self, chunks: Tensor) -> Tensor:
        """The tokens ``[.., 32]`` of ``chunks [.., 1]``, ascending."""
        steps = torch.arange(_CHUNK, device=chunks.device) * self._chunks
        return torch.where(chunks < self._chunks, chunks + steps, chunks + steps[-1])


class RunningSum:
    """The running sum of weights in order of the logits, the largest first.

    Bins of logits tell where a sum is reached; only that bin is sorted.

    Its arrays serve row after row.

    Args:
        vocab: tokens of a row.

    Attributes:
        total: of the weights that were not cut off.
    """

    def __init__(self, vocab: int) -> None:
        self._scaled, self._weights, self._places = (np.empty(vocab) for _ in range(3))
        self._bins = np.empty(vocab, np.int64)

    def begin(self, values: NDArray[np.float64], temperature: float) -> None:
        """The next row, of logits ``[vocab]``; its weights are ``exp(values / temperature)``, the
        largest of which is made 1.
        """
        with np.errstate(over="ignore"):
            np.divide(values - values.max(), temperature, out=self._scaled)
        np.exp(self._scaled, out=self._weights)
        np.multiply(self._scaled, -_BINS / _NATS, out=self._places)
        np.minimum(self._places, _BINS - 1, out=self._places)
        np.copyto(self._bins, self._places, casting="unsafe")
        self._sums = np.bincount(self._bins, self._weights, _BINS).cumsum()

    @property
    def total(self) -> float:
        """The sum of all that is left."""
        return float(self._sums[-1])

    def at(self, target: float) -> int:
        """The first token at which the sum is above ``target``, else the last that adds to it."""
        last = int(np.searchsorted(self._sums, self.total))
        inside = min(int(np.searchsorted(self._sums, target, "right")), last)
        tokens, sums = self._inside(inside)
        end = int(np.searchsorted(sums, sums[-1]))
        return int(tokens[min(int(np.searchsorted(sums, target, "right")), end)])

    def cut_at(self, target: float) -> None:
        """Leaves the tokens up to the first at which the sum reaches ``target``."""
        inside = min(int(np.searchsorted(self._sums, target)), _BINS - 1)
        place = int(np.searchsorted(self._inside(inside)[1], target))
        self._cut(inside, place)

    def cut_behind(self, count: int) -> None:
        """Leaves the first ``count`` tokens."""
        counts = np.bincount(self._bins, minlength=_BINS).cumsum()
        inside = int(np.searchsorted(counts, count))
        self._cut(inside, count - 1 - (int(counts[inside - 1]) if inside else 0))

    def cut_below(self, weight: float) -> None:
        """Leaves the tokens that weigh at least that, the first of which weighs 1."""
        self.cut_behind(int(np.count_nonzero(self._weights >= weight)))

    def _inside(self, inside: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The tokens of a bin in order, and the running sum at each."""
        members = np.flatnonzero(self._bins == inside)
        tokens = members[np.argsort(-self._scaled[members], kind="stable")]
        before = self._sums[inside - 1] if inside else 0.0
        return tokens, before + self._weights[tokens].cumsum()

    def _cut(self, inside: int, place: int) -> None:
        tokens, sums = self._inside(inside)
        place = min(place, len(tokens) - 1)
        self._weights[tokens[place + 1 :]] = 0
        self._sums[inside:] = sums[place]


def _keys(values: Tensor, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Integers in the order of the values, 32 bits, and of the ids turned round, 32 bits."""
    bits = (values.float().cpu() + 0.0).contiguous().view(torch.int32).numpy()  # no -0.0
    keys: NDArray[np.int64] = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).astype(np.int64)
    keys <<= 32
    keys |= _LOW - ids
    return keys


def _ids(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    ids: NDArray[np.int64] = _LOW - (keys & _LOW)
    return ids


def _largest(keys: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The ``count`` largest of each row, in any order."""
    if count == keys.shape[1]:
        return keys
    largest: NDArray[Any] = np.partition(keys, keys.shape[1] - count, axis=1)
    return largest[:, -count:]
