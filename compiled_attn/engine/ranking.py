"""The most likely tokens of rows of logits, found without sorting the rows.

In order, equal logits stand by their ids, the lower one first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["RankedRows"]

_FEW = 1024  # tokens that are taken out of a row at once, at most
_CHUNK = 32
_WIDE = 64 * _CHUNK  # vocabularies below it are looked at whole
_LOW = 0xFFFFFFFF
_SAMPLED = 256  # maxima, of which a quarter are below the head: some 24th of the tokens are in it


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

    def row(self, row: int) -> NDArray[Any]:
        """The logits ``[vocab]`` of a row: float32, or float64 where they are."""
        wide = torch.promote_types(self._logits.dtype, torch.float32)
        values: NDArray[Any] = self._logits[row].to("cpu", wide).numpy()
        return values

    def head(self, row: int, values: NDArray[Any]) -> NDArray[np.int64]:
        """Some of the ``values [vocab]`` of a row: ids of the largest, ascending, maybe none."""
        if not self._chunks or values.dtype != np.float32:
            return np.zeros(0, np.int64)
        maxima = self._maxima[row, :_SAMPLED].float().cpu().numpy()
        at = len(maxima) // 4
        # Eight at once, as most of them have none.
        eights = np.packbits(values > np.partition(maxima, at)[at], bitorder="little")
        some = np.flatnonzero(eights != 0)
        inside = np.flatnonzero(np.unpackbits(eights[some], bitorder="little").view(np.bool_))
        ids: NDArray[np.int64] = some[inside >> 3] * 8 + (inside & 7)
        return ids

    def _take(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """The logits of ``tokens [n, m]`` of each of ``rows [n]``, none of which is there twice."""
        if len(rows) == len(self._logits):  # all, in order
            return self._logits.gather(1, tokens)
        return torch.take(self._logits, tokens + rows[:, None] * self.vocab)

    def _members(self, chunks: Tensor) -> Tensor:
        """The tokens ``[.., 32]`` of ``chunks [.., 1]``, ascending."""
        steps = torch.arange(_CHUNK, device=chunks.device) * self._chunks
        return torch.where(chunks < self._chunks, chunks + steps, chunks + steps[-1])


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
