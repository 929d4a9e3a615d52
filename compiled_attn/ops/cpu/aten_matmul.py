"""Torch's matrix products as replayable calls, for layers whose weights are not packed."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphs.torch_internals.replay.calls import Call

__all__ = ["matmul_call"]

_aten = torch.ops.aten
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # numbered as `Dtype` of csrc/abi.h
_WORDS = 6  # per matrix


def matmul_call(
    native: ctypes.CDLL, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any
) -> Call | None:
    """Returns a call that does what a matrix product of torch did; None for other ops.

    Args:
        native: a library, see `compiled_attn.ops.cpu.build.build`.
        op, args, kwargs, made: see `graphs.torch_internals.replay.calls.Replayer.call_of`.
    """
    from graphs.backends.onednn_linear import takes_onednn  # loads inductor

    entry, bias = native.compiled_attn_matmul, None
    if op is _aten.mm.out and [*kwargs] == ["out"]:
        left, right = args
    elif op is _aten.bmm.out and [*kwargs] == ["out"] and len(made) == 1:
        entry = native.compiled_attn_bmm  # torch adds in another order than for mm
        made, left, right = made[0], args[0][0], args[1][0]
    elif op is _aten.addmm.out and [*kwargs] == ["out"]:
        bias, left, right = args
    elif op is torch.ops.graphs.onednn_linear.default and not kwargs:
        left, weight, bias = args
        right = weight.t()
        if takes_onednn(left):
            if not left.is_contiguous():  # so that its output is, which is copied
                return None
            entry = native.compiled_attn_onednn_matmul
    else:
        return None
    matrices = [made, left, right]
    if bias is not None:
        matrices.append(bias.expand(made.shape))
    if not all(_is_matrix(each, made.dtype) for each in matrices):
        return None
    address = ctypes.cast(entry, ctypes.c_void_p).value or 0
    words = [address, *(word for each in matrices for word in _words_of(each))]
    addresses = range(1, len(words), _WORDS)
    words += [0] * (1 + 4 * _WORDS - len(words))  # no bias
    return Call(words, [at for at in addresses if words[at]])


def _is_matrix(tensor: Tensor, dtype: torch.dtype) -> bool:
    is_plain = not (tensor.is_conj() or tensor.is_neg()) and tensor.device.type == "cpu"
    return is_plain and tensor.dim() == 2 and tensor.dtype is dtype and dtype in _DTYPES


def _words_of(matrix: Tensor) -> list[int]:
    return [matrix.data_ptr(), *matrix.shape, *matrix.stride(), _DTYPES.index(matrix.dtype)]
