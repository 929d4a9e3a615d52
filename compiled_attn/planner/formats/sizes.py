"""Engines that pad steps along one axis: their default sizes, and the options that take others."""

from __future__ import annotations

import json
from collections.abc import Sequence

from compiled_attn.planner.judge import BucketUse
from compiled_attn.planner.simulator.engine import SimulatedEngine

__all__ = [
    "sglang_sizes",
    "tensorrt_sizes",
    "vllm_ladder",
    "vllm_sizes",
    "write_sglang",
    "write_tensorrt",
    "write_vllm",
]

_COMPILED = 0.1  # share of the steps from which vLLM compiles a size separately


def vllm_sizes(engine: SimulatedEngine) -> list[int]:
    """Return vLLM's sizes of CUDA graphs in tokens: 1 2 4, each 8 up to 256, each 16 above.

    As in vLLM 0.32.0 and 0.33.0 (``vllm/config/vllm.py``, ``_set_cudagraph_sizes``;
    ``vllm/v1/cudagraph_dispatcher.py``), with 512 as the largest (1024 on data-centre Blackwell).
    """
    top = min(engine.max_tokens, 2 * engine.max_seqs, 512)
    own = {engine.max_seqs, engine.max_tokens}
    return sorted({*vllm_ladder(top), *(size for size in own if size <= top)})


def vllm_ladder(top: int) -> list[int]:
    """Return 1, 2, 4, multiples of 8 below 256 and of 16 from there on, up to ``top``."""
    ladder = (1, 2, 4, *range(8, 256, 8), *range(256, top + 1, 16))
    return [size for size in ladder if size <= top]


def write_vllm(sizes: Sequence[int], uses: Sequence[BucketUse]) -> str:
    """Return the value of ``--compilation-config``; ``compile_sizes`` must be captured ones."""
    often = {use.bucket.sizes[0] for use in uses if use.share >= _COMPILED}
    return json.dumps({"cudagraph_capture_sizes": sizes, "compile_sizes": sorted(often)})


def sglang_sizes(engine: SimulatedEngine) -> list[int]:
    """Return SGLang's batch sizes of decode graphs without speculative decoding.

    As in sgl-project/sglang (``server_args.py``, ``_generate_cuda_graph_batch_sizes``;
    ``cuda_graph_runner.py``), with the largest of a GPU with 60 to 90 GB at tensor parallel below
    4; others have 8 to 512.
    """
    top = min(engine.max_seqs, 256)
    return sorted({size for size in (1, 2, 4, 8, 12, *range(16, 257, 8)) if size <= top} | {top})


def write_sglang(sizes: Sequence[int], uses: Sequence[BucketUse]) -> str:
    """Return the option and its values; newer versions call it ``--cuda-graph-bs-decode``."""
    return "--cuda-graph-bs " + " ".join(map(str, sizes))


def tensorrt_sizes(engine: SimulatedEngine) -> list[int]:
    """Return TensorRT-LLM's batch sizes of decode graphs with padding, for all decodes.

    As in NVIDIA/TensorRT-LLM 1.4.0rc1 (``tensorrt_llm/llmapi/llm_args.py``,
    ``_generate_cuda_graph_batch_sizes``; ``_torch/pyexecutor/cuda_graph_runner.py``,
    ``_get_padded_batch``), with ``enable_padding`` and the engine's requests as
    ``max_batch_size``. By default padding is off, and only decodes of exactly a size are replayed.
    """
    top = engine.max_seqs
    ladder = (1, 2, 4, *range(8, 129, 8), *range(192, top + 1, 64))
    return sorted({size for size in ladder if size <= top} | {top})


def write_tensorrt(sizes: Sequence[int], uses: Sequence[BucketUse]) -> str:
    """Return the option as YAML; ``max_batch_size`` must be the largest size."""
    return "\n".join(
        [
            "cuda_graph_config:",
            "  enable_padding: true",
            f"  max_batch_size: {sizes[-1]}",
            f"  batch_sizes: [{', '.join(map(str, sizes))}]",
        ]
    )
