"""SGLang: batch sizes of its decode graphs, for ``--cuda-graph-bs``.

As in sgl-project/sglang (``server_args.py``, ``_generate_cuda_graph_batch_sizes``;
``cuda_graph_runner.py``): a decode runs in the graph of the smallest batch that fits, and without a
graph above the largest. Newer versions call the option ``--cuda-graph-bs-decode`` and accept
``--cuda-graph-bs`` as an alias.
"""

from __future__ import annotations

from compiled_attn.planner.formats.base import EnginePart, Limits, Plans, part_of_sizes
from compiled_attn.planner.simulator.simulated_steps import SeparateSteps

__all__ = ["TESTED", "batch_sizes", "parts", "write"]

TESTED = ("sglang", ())  # sources only: it does not install without a GPU

_LARGEST = 256  # of a GPU with 60 to 90 GB at tensor parallel below 4; others have 8 to 512


def batch_sizes(max_seqs: int, largest: int = _LARGEST) -> list[int]:
    """Return SGLang's default sizes without speculative decoding."""
    top = min(max_seqs, largest)
    ladder = {1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, top + 1, 32)}
    return sorted({size for size in ladder if size <= top} | {top})


def parts(limits: Limits) -> list[EnginePart]:
    """Return decodes only: prompts are padded by other rules, or not at all."""
    sizes = batch_sizes(limits.max_seqs)
    return [part_of_sizes("decode", "decode", "sequences", sizes, SeparateSteps)]


def write(plans: Plans) -> str:
    """Return the option and its values."""
    sizes = sorted(bucket["sequences"] for bucket in plans["decode"].report.space)
    return "--cuda-graph-bs " + " ".join(map(str, sizes))
