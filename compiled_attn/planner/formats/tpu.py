"""vLLM on TPUs: sizes of steps in tokens, and of their attention in requests.

As in vllm-project/tpu-inference (``tpu_inference/runner/tpu_runner.py``, ``_init_inputs``;
``runner/utils.py``, ``get_token_paddings``, ``get_attn_req_paddings``, ``get_padded_token_len``;
``envs.py``). Each axis is padded to its smallest size that fits, and every pair of sizes is
compiled. Sizes in tokens start from a power of two and double, and ``compilation_sizes`` adds
others; a start at the largest leaves only the added ones. Cache pages are not padded: the block
table has the width of a full context.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from compiled_attn.planner import CostModel, PlanReport
from compiled_attn.planner.formats.base import EnginePart
from compiled_attn.planner.simulator.engine import SimulatedEngine
from compiled_attn.planner.simulator.kinds import StepKind
from graphs.buckets.ladders import explicit
from graphs.buckets.space import Axis

__all__ = ["parts", "token_ladder", "write"]

_MIN_TOKENS = 16  # MIN_TOKEN_BUCKET
_MIN_SEQS = 8


def token_ladder(engine: SimulatedEngine) -> list[int]:
    """Return the sizes in tokens by default: 16, 32, .. up to the first that holds every step."""
    sizes = [_MIN_TOKENS]
    while sizes[-1] < engine.max_tokens:
        sizes.append(2 * sizes[-1])
    return sizes


def parts(engine: SimulatedEngine, context: int) -> list[EnginePart]:
    """Return tokens, and requests of the attention, by default a single size."""
    ladders = {"tokens": token_ladder(engine), "requests": [max(engine.max_seqs, _MIN_SEQS)]}
    return [_part(axis, sizes, engine.time.token) for axis, sizes in ladders.items()]


def _part(axis: str, sizes: list[int], seconds: float) -> EnginePart:
    whole = Axis(axis, 1, sizes[-1])
    cost = CostModel(lambda need: need[axis] * seconds)
    kind = StepKind("table", (whole,), lambda need: need[axis] >= 1, cost)
    return EnginePart(axis, kind, explicit([whole], sizes))


def write(plans: Mapping[str, PlanReport], engine: SimulatedEngine) -> str:
    """Return lines for the shell: three variables that the engine reads, and its option."""
    tokens, requests = (
        sorted(bucket[axis] for bucket in plans[axis].space) for axis in ("tokens", "requests")
    )
    config = json.dumps({"compilation_sizes": tokens[:-1]})
    return "\n".join(
        [
            f"export MIN_TOKEN_BUCKET={tokens[-1]}",
            "export ATTN_BUCKETIZED_NUM_REQS=1",
            f"export ATTN_CUSTOM_NUM_REQS_BUCKETS={','.join(map(str, requests))}",
            f"ADDITIONAL_CONFIG='{config}'",
        ]
    )
