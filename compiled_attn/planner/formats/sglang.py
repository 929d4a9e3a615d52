"""SGLang: batch sizes of its decode graphs, as its ``--cuda-graph-bs`` takes them.

Read in sgl-project/sglang (``server_args.py`` at 469c63e, ``_generate_cuda_graph_batch_sizes``;
``cuda_graph_runner.py`` at 0021673): a decode runs in the graph of the smallest batch that holds
it, and without a graph above the largest. Newer versions call the option ``--cuda-graph-bs-decode``
and keep ``--cuda-graph-bs`` as an alias.
"""

from __future__ import annotations

from collections.abc import Mapping

from compiled_attn.planner.formats.base import EnginePart, EnginePlan, Limits, part_of_sizes
from compiled_attn.planner.simulator.steps import SeparateSteps

__all__ = ["TESTED", "batch_sizes", "parts", "written"]

TESTED = ("sglang", ())  # read only: it does not install without a GPU

_LARGEST = 256  # of a GPU with 60 to 90 GB at tensor parallel below 4; others have 8 to 512


def batch_sizes(max_seqs: int, largest: int = _LARGEST) -> list[int]:
    """The sizes that SGLang captures by default, without speculative decoding."""
    top = min(max_seqs, largest)
    ladder = {1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, top + 1, 32)}
    return sorted({size for size in ladder if size <= top} | {top})


def parts(limits: Limits) -> list[EnginePart]:
    """Decodes only: prompts are padded by other rules, or not at all."""
    sizes = batch_sizes(limits.max_seqs)
    return [part_of_sizes("decode", "decode", "sequences", sizes, SeparateSteps)]


def written(plans: Mapping[str, EnginePlan]) -> str:
    """The option and its values."""
    sizes = sorted(bucket["sequences"] for bucket in plans["decode"].report.space)
    return "--cuda-graph-bs " + " ".join(map(str, sizes))
