"""Scenes of `native_scene` as calls of the Triton kernels, with plans of one's own."""

from __future__ import annotations

from compiled_attn.attention.scoring import Scoring
from compiled_attn.ops.call import PagedCall
from tests.compiled_attn.ops.native_scene import Scene


def call_of(step: Scene) -> PagedCall:
    names = "window", "softcap", "alibi_slopes", "sinks"
    scoring = Scoring(step.scale, **{name: step.options.get(name) for name in names})
    return PagedCall(
        *step.arguments[:6],
        scoring,
        step.options.get("causal", True),
        step.options.get("key_scale"),
        step.options.get("value_scale"),
    )
