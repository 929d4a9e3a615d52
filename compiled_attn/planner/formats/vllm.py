"""vLLM: sizes of CUDA graphs in tokens of a step, for ``--compilation-config``.

As in vLLM 0.32.0 and 0.33.0 (``vllm/config/vllm.py``, ``_set_cudagraph_sizes``;
``vllm/v1/cudagraph_dispatcher.py``): a step runs in the graph of the smallest size that fits its
tokens, and without a graph, unpadded, above the largest. A size in ``compile_sizes`` must be one of
the captured ones.
"""

from __future__ import annotations

import json

from compiled_attn.planner.formats.base import EnginePart, Limits, Plans, part_of_sizes
from compiled_attn.planner.simulator.simulated_steps import SimulatedSteps

__all__ = ["TESTED", "capture_sizes", "parts", "write"]

TESTED = ("vllm", ("0.32", "0.33"))

_LARGEST = 512  # 1024 on data-centre Blackwell
_COMPILED = 0.1  # share of the steps from which a size is worth a compile of its own


def capture_sizes(max_seqs: int, max_tokens: int, largest: int = _LARGEST) -> list[int]:
    """Return vLLM's default sizes: 1 2 4, each 8 up to 256, each 16 above."""
    top = min(max_tokens, 2 * max_seqs, largest)
    ladder = {1, 2, 4, *range(8, 256, 8), *range(256, top + 1, 16), max_seqs, max_tokens}
    return sorted(size for size in ladder if size <= top)


def parts(limits: Limits) -> list[EnginePart]:
    """Return one part, of steps up to the largest default size."""
    sizes = capture_sizes(limits.max_seqs, limits.max_tokens)
    return [part_of_sizes("steps", "table", "tokens", sizes, SimulatedSteps)]


def write(plans: Plans) -> str:
    """Return the value of ``--compilation-config``.

    A size is compiled separately where a tenth of the steps runs in it.
    """
    report = plans["steps"].report
    often = [use.bucket["tokens"] for use in report.uses if use.share >= _COMPILED]
    config = {
        "cudagraph_capture_sizes": sorted(bucket["tokens"] for bucket in report.space),
        "compile_sizes": sorted(often),
    }
    return json.dumps(config)
