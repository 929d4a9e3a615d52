"""vLLM on Ascend: vLLM's capture sizes, as many as the streams of the device allow.

As in vllm-project/vllm-ascend (``vllm_ascend/platform.py`` of v0.25.1rc1 for the largest size;
``update_aclgraph_sizes`` in ``vllm_ascend/utils.py`` up to v0.20 for the number that fits, with
communication by FFTS+). Up to v0.20 the plugin itself thinned out a list that was too long; newer
versions fail while capturing, so the list has to fit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from compiled_attn.planner.formats.sizes import vllm_ladder
from compiled_attn.planner.judge import BucketUse
from compiled_attn.planner.simulator.engine import SimulatedEngine

__all__ = ["ascend_captures", "ascend_sizes", "write_ascend"]

_PER_GROUP = 40  # streams that a communication group takes once
_LARGEST = 512


def ascend_captures(layers: int, groups: int, streams: int) -> int:
    """Return how many sizes can be captured, each piecewise and, for decodes, as a whole.

    A piecewise capture takes a stream for each layer and one more, and two of the same for each
    communication group; a whole one takes one.

    Args:
        layers: hidden layers, those of a draft model (and one) included.
        groups: communication groups: 0 to 2, one each for tensor and data parallel ranks.
        streams: of the device that graphs may take: 1800 of its 2048 by default.

    Raises:
        ValueError: not a single size fits.
    """
    piecewise = (layers + 1) * (1 + 2 * groups)
    found = (streams - groups * _PER_GROUP) // (piecewise + 1)
    if found < 1:
        raise ValueError(
            f"expected streams for a capture of {layers} layers in {groups} communication groups, "
            f"{piecewise + 1 + groups * _PER_GROUP}, got {streams}: run without graphs"
        )
    return found


def ascend_sizes(engine: SimulatedEngine) -> list[int]:
    """Return the sizes in tokens by default, before they are thinned out: up to a full decode."""
    return vllm_ladder(min(engine.max_seqs, engine.max_tokens, _LARGEST))


def write_ascend(sizes: Sequence[int], uses: Sequence[BucketUse]) -> str:
    """Return the value of ``--compilation-config``; nothing is compiled by inductor there."""
    return json.dumps({"cudagraph_capture_sizes": sizes})
