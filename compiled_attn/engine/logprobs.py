"""The result of a row of logits, and log-probabilities before any setting changes the logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["RowResult", "TokenLogprobs", "logprobs_of", "most_likely", "token_logprobs"]

_SPARE = 1024  # chunks beyond twice the count, before rows are handled one by one
_CHUNK = 32
_WIDE = 64 * _CHUNK  # vocabularies below it are looked at whole
_LOW = 0xFFFFFFFF


def most_likely(logits: Tensor, count: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Returns values and ids ``[R, count]`` of the largest logits of each row; ties go to the lower
    id.

    The k largest of a row are in those chunks of 32 tokens whose maxima are not below the k-th
    largest maximum. Chunk ``j`` of ``C`` holds the tokens ``j, j + C, ...``, so that finding the
    maxima is one pass of plain vector maxima; tokens after the last whole chunk are chunks of one.

    Args:
        logits: ``[R, vocab]``, any float dtype; float64 is compared as float32.
        count: how many to return; at most the whole vocabulary.
    """
    vocab = logits.shape[1]
    count = min(count, vocab)
    if vocab < _WIDE:
        ids = _ids(_first(_keys(logits, np.arange(vocab)), count))
    else:
        chunks = vocab // _CHUNK
        whole = logits[:, : chunks * _CHUNK].unflatten(1, (_CHUNK, chunks)).amax(1)
        maxima = torch.cat([whole, logits[:, chunks * _CHUNK :]], 1)
        ids = _by_chunks(logits, maxima, chunks, count)
    values = logits.gather(1, torch.from_numpy(ids).to(logits.device))
    return values.double().cpu().numpy(), ids


def _by_chunks(logits: Tensor, maxima: Tensor, chunks: int, count: int) -> NDArray[np.int64]:
    # Include all chunks that tie with the last maximum: each may have a token of a lower id.
    largest, at = maxima.topk(min(count, maxima.shape[1]), sorted=False)
    needed = int((maxima >= largest.amin(1, keepdim=True)).sum(1).max())
    if needed > 2 * count + _SPARE and len(logits) > 1:  # one row of ties must not slow all
        rows = zip(logits.split(1), maxima.split(1), strict=True)
        return np.concatenate([_by_chunks(*row, chunks, count) for row in rows])
    if needed > at.shape[1]:
        tied = _largest(_keys(maxima, np.arange(maxima.shape[1])), needed)
        at = torch.from_numpy(_ids(tied)).to(logits.device)
    steps = torch.arange(_CHUNK, device=logits.device) * chunks
    members = at[:, :, None] + torch.where(at[:, :, None] < chunks, steps, steps[-1])
    members = members.flatten(1)
    # A chunk of one is gathered 32 times: only the first counts.
    keys = _keys(logits.gather(1, members), members.cpu().numpy())
    alone = np.repeat(at.cpu().numpy() >= chunks, _CHUNK, axis=1)
    alone[:, ::_CHUNK] = False
    keys[alone] = np.iinfo(np.int64).min
    return _ids(_first(keys, count))


def _keys(values: Tensor, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sort keys: 32 bits of the value, then 32 bits of the inverted id."""
    bits = (values.float().cpu() + 0.0).contiguous().view(torch.int32).numpy()  # no -0.0
    keys: NDArray[np.int64] = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).astype(np.int64)
    keys <<= 32
    keys |= _LOW - ids
    return keys


def _ids(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    ids: NDArray[np.int64] = _LOW - (keys & _LOW)
    return ids


def _first(keys: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    return np.sort(_largest(keys, count), axis=1)[:, ::-1]


def _largest(keys: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The ``count`` largest of each row, in any order."""
    if count == keys.shape[1]:
        return keys
    largest: NDArray[Any] = np.partition(keys, keys.shape[1] - count, axis=1)
    return largest[:, -count:]


class TokenLogprobs(NamedTuple):
    """The log-probability of a token, and the most likely tokens at its position.

    Args:
        top: ids and log-probabilities of the most likely tokens, the likeliest first; ties go to
            the lower id.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class RowResult(NamedTuple):
    """What a step yields for one request: its next token, or an error.

    Args:
        token: id of the next token; None with an error.
        error: why there is none, else "".
        prompt_logprobs: those of the prompt tokens after the computed ones.
        draft: position of the token in its draft, from 1 on; 0: it was not drafted.
        more: the results after it, one more than the first tokens of its draft that were accepted.
    """

    token: int | None = None
    error: str = ""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    draft: int = 0
    more: tuple[RowResult, ...] = ()


def log_sum_exp(logits: Tensor) -> NDArray[np.float64]:
    """Log-sum-exp of each row ``[R, vocab]``, float32 or float64, with sums in float64.

    Row by row: torch's sums depend on the number of rows and threads.
    """
    with np.errstate(all="ignore"):  # of rows that are not finite
        return np.array([_log_sum_exp(row) for row in logits.detach().cpu().numpy()], np.float64)


def _log_sum_exp(row: NDArray[Any]) -> float:
    peak = row.max()
    total = np.exp(row - peak).sum(dtype=np.float64)
    return float(peak + np.log(total))


def token_logprobs(logits: Tensor, tokens: Sequence[int]) -> NDArray[np.float64]:
    """Log-probability of one token of each row ``[R, vocab]``, any float dtype."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return _chosen(wide, tokens) - log_sum_exp(wide)


def _chosen(logits: Tensor, tokens: Sequence[int]) -> NDArray[np.float64]:
    rows = torch.arange(len(logits), device=logits.device)
    at = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
    chosen: NDArray[np.float64] = logits[rows, at].double().detach().cpu().numpy()
    return chosen


def logprobs_of(
    logits: Tensor, tokens: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """Computes log-probabilities of one token of each row and of the most likely ones.

    Args:
        logits: ``[R, vocab]``, any float dtype.
        tokens: R ids.
        counts: how many of the most likely tokens to return for each row.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = log_sum_exp(wide)
    own = (_chosen(wide, tokens) - total).tolist()
    if not any(counts):
        return [TokenLogprobs(*each, ()) for each in zip(tokens, own, strict=True)]
    values, ids = most_likely(wide, max(counts))
    logprobs = (values - total[:, None]).tolist()
    return [
        TokenLogprobs(token, logprob, tuple(zip(of_row[:count], each[:count], strict=True)))
        for token, logprob, count, of_row, each in zip(
            tokens, own, counts, ids.tolist(), logprobs, strict=True
        )
    ]
