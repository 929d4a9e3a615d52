"""Buckets for other engines: the default ladder, the picking rule and the syntax of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compiled_attn.planner import Demand
from compiled_attn.planner.formats import ascend, continuous, gaudi, sizes, tpu
from compiled_attn.planner.formats.base import EnginePart, Format, of_sizes, thinned
from compiled_attn.planner.simulator import SimulatedEngine, simulate
from compiled_attn.workloads import Arrival

__all__ = ["FORMATS", "EnginePart", "Format", "needs_of", "thinned"]

FORMATS: Mapping[str, Format] = {
    "vllm": of_sizes(
        "vllm",
        ("0.32", "0.33"),
        "tokens",
        sizes.vllm_sizes,
        sizes.write_vllm,
        'vllm serve MODEL --compilation-config "$(cat {file})"',
    ),
    "vllm-gaudi": Format(
        "vllm-gaudi",
        (),  # sources and parser only: the plugin needs Gaudi's own torch
        gaudi.parts,
        gaudi.write,
        "VLLM_BUCKETING_FROM_FILE={file} vllm serve MODEL",
        beyond="compiles while serving",
    ),
    "sglang": of_sizes(
        "sglang",
        (),  # sources only: it does not install without a GPU
        "sequences",
        sizes.sglang_sizes,
        sizes.write_sglang,
        "python -m sglang.launch_server --model-path MODEL $(cat {file})",
    ),
    "tensorrt-llm": of_sizes(
        "tensorrt-llm",
        (),  # sources only: it does not install without a GPU
        "sequences",
        sizes.tensorrt_sizes,
        sizes.write_tensorrt,
        "trtllm-serve MODEL --config {file}",
    ),
    "vllm-ascend": of_sizes(
        "vllm-ascend",
        (),  # sources only: the plugin needs Ascend's own torch
        "tokens",
        ascend.ascend_sizes,
        ascend.write_ascend,
        'vllm serve MODEL --compilation-config "$(cat {file})"',
        captures=ascend.ascend_captures,
    ),
    "tpu-inference": Format(
        "tpu-inference",
        (),  # sources only: it needs a TPU
        tpu.parts,
        tpu.write,
        '. {file} && vllm serve MODEL --additional-config "$ADDITIONAL_CONFIG"',
        beyond="is refused",
        is_grid=True,
    ),
    "transformers": Format(
        "transformers",
        ("5.23", "5.24"),
        continuous.parts,
        continuous.write,
        "ContinuousBatchingConfig(**json.load(open('{file}')))",
        beyond="waits for another step",
    ),
}


def needs_of(
    parts: Sequence[EnginePart],
    arrivals: Sequence[Arrival],
    engine: SimulatedEngine,
    *,
    speed: float | None = None,
    concurrency: int | None = None,
) -> dict[str, Demand]:
    """Simulate requests within the engine's limits; returns the needs of each part."""
    steps = parts[0].kind.steps
    found = simulate(arrivals, engine, speed=speed, concurrency=concurrency, steps=steps)
    for part in parts:
        if part.kind.name not in found.needs:
            raise ValueError(
                f"expected steps of the kind {part.kind.name}, got none: give a trace whose "
                "requests generate several tokens"
            )
    return {part.name: part.measure(found.needs[part.kind.name]) for part in parts}
