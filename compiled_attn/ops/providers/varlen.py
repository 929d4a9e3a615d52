"""Torch's flash attention over pages, ``torch.nn.attention.varlen``.

It differs from Triton's kernel in two ways: a non-finite value in any slot of a request makes all
its rows NaN, even rows that do not see it; and indices are not checked.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from compiled_attn.ops.call import PagedCall
from compiled_attn.ops.providers import flash
from compiled_attn.ops.providers.base import Paged

__all__ = [
    "OPTIONS",
    "VarlenKernel",
    "active_implementation",
    "lacks_arguments",
    "options",
    "varlen_attn",
]

OPTIONS = "return_aux", "scale", "window_size", "enable_gqa"
_MODULE = "torch.nn.attention.varlen"


class VarlenKernel:
    """The kernel behind ``torch.nn.attention.varlen.varlen_attn`` with a block table."""

    name = "varlen"

    def version(self) -> str:
        """See `compiled_attn.ops.providers.Provider`."""
        return str(active_implementation())

    def why_not(self, call: PagedCall) -> str | None:
        """See `compiled_attn.ops.providers.Provider`."""
        return flash.lacks(call) or _unavailable(call)

    def attend(self, call: PagedCall, paged: Paged) -> tuple[Tensor, Tensor]:
        """See `compiled_attn.ops.providers.Provider`."""
        tokens, width = call.query.shape[0], call.block_table.shape[1]
        out, lse = varlen_attn(
            call.query, call.key_cache, call.value_cache, call.query_start_loc, None, tokens,
            width * call.key_cache.shape[1], **options(call), seqused_k=call.seq_lens,
            block_table=call.block_table,
        )  # fmt: skip
        return flash.own_rows(call, out, lse)


def active_implementation() -> str | None:
    """Returns torch's active flash attention, such as "FA3"; None: the default, without pages."""
    active: Any = getattr(import_module("torch.nn.attention"), "current_flash_attention_impl", None)
    return active() if active else None


def options(call: PagedCall) -> dict[str, Any]:
    """Returns the options of ``varlen_attn`` that each use of it has."""
    aux: Any = import_module(_MODULE)
    is_grouped = call.query.shape[1] != call.key_cache.shape[2]
    values = aux.AuxRequest(lse=True), float(call.scoring.scale), flash.window_of(call), is_grouped
    return dict(zip(OPTIONS, values, strict=True))


def varlen_attn(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Calls ``torch.nn.attention.varlen.varlen_attn``; returns out and lse ``[H, T]``."""
    out, lse = import_module(_MODULE).varlen_attn(*tensors, **options)
    return out, lse


def lacks_arguments(*names: str) -> str | None:
    """Returns that torch's function does not take all of some arguments, or None."""
    lacks = [each for each in names if each not in _parameters(import_module(_MODULE).varlen_attn)]
    if not lacks:
        return None
    return f"needs torch 2.12: the one of {torch.__version__} takes no {', '.join(lacks)}"


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _unavailable(call: PagedCall) -> str | None:
    if lacks := lacks_arguments(*OPTIONS, "block_table"):
        return lacks
    active, page = active_implementation(), call.key_cache.shape[1]
    if active not in ("FA3", "FA4"):
        return (
            "needs FA3 (sm_90) or FA4 (sm_100), as FA2 of torch has no pages: call "
            "torch.nn.attention.activate_flash_attention_impl"
        )
    needs, has = 9 if active == "FA3" else 10, flash.capability(call.query.device)
    if has[0] != needs:
        return f"has pages with {active} on sm_{needs}0, not on sm_{has[0]}{has[1]}"
    if active == "FA4" and page != 128:
        return f"has pages of 128 with FA4, not of {page}"
    return None
