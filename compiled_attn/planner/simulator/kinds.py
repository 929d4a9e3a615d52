"""Kinds of steps that engines capture graphs for: axes, legal needs and cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from compiled_attn.planner import CostModel, Demand
from compiled_attn.planner.simulator.engine import SimulatedEngine
from compiled_attn.planner.simulator.simulated_steps import SeparateSteps, SimulatedSteps
from graphs.buckets.space import Axis

__all__ = ["KINDS", "StepKind", "step_kind", "within"]

_USUAL_SHARE = 0.005


@dataclass(frozen=True)
class StepKind:
    """A kind of steps.

    Args:
        name: of the simulated needs.
        axes: with the engine's limits.
        legal: which needs within the limits can occur, numbers or arrays by axis.
        cost: of a bucket, in seconds of the simulated device without the constant part.
        usual: sizes up to which usual ladders go where the limit is rarely reached: the shared
            blocks of one context, while a step may read those of several.
        steps: how steps are scheduled and recorded.
    """

    name: str
    axes: tuple[Axis, ...]
    legal: Callable[[Mapping[str, Any]], Any]
    cost: CostModel
    usual: Mapping[str, int] = field(default_factory=dict)
    steps: type[SimulatedSteps] = SimulatedSteps

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes."""
        return tuple(axis.name for axis in self.axes)

    def with_largest_usual(self, demand: Demand) -> Demand:
        """Add the largest usual step at a small share of the demand's cost.

        A recording rarely has that step, and without it steps close to it would be padded to the
        maximum.
        """
        if not self.usual:
            return demand
        largest = np.array([[self.usual.get(axis.name, axis.high) for axis in self.axes]])
        cost = float(self.cost.of(self.names, demand.points) @ demand.weights)
        weight = _USUAL_SHARE * cost / float(self.cost.of(self.names, largest)[0])
        points = np.concatenate([demand.points, largest])
        return Demand(self.names, points, np.append(demand.weights, weight))


def within(demand: Demand, axes: Sequence[Axis]) -> tuple[Demand, float]:
    """Return the needs within the axes, in their order, and the share of the others.

    The engine splits a step that exceeds every bucket.

    Raises:
        ValueError: no need fits, or an axis is missing.
    """
    projected = demand.project([axis.name for axis in axes])
    fits = (projected.points <= [axis.high for axis in axes]).all(axis=1)
    if not fits.any():
        limits = ", ".join(f"{axis.name} <= {axis.high}" for axis in axes)
        raise ValueError(f"expected needs with {limits}, got none: raise the limits")
    fitting = Demand(projected.names, projected.points[fits], projected.weights[fits])
    return fitting, 1 - fitting.total / demand.total


def _table(engine: SimulatedEngine, context: int) -> StepKind:
    return StepKind(
        "table",
        (Axis("tokens", 1, engine.max_tokens), Axis("requests", 1, engine.max_seqs)),
        lambda n: n["requests"] <= n["tokens"],
        CostModel(lambda n: engine.time.token * (n["tokens"] + n["requests"])),
    )


def _engine(engine: SimulatedEngine, context: int) -> StepKind:
    time, size, longest = engine.time, engine.block_size, _longest(engine, context)
    contexts = max(1, min(engine.max_seqs, engine.max_tokens // 2))
    axes = (
        Axis("tokens", 1, engine.max_tokens),
        Axis("shared", 0, min(engine.blocks, contexts * longest)),
        Axis("unique", 0, min(engine.blocks, engine.max_seqs * longest)),
        Axis("logits", 0, engine.max_seqs),
    )

    def legal(n: Mapping[str, Any]) -> Any:
        fits = (n["unique"] <= n["tokens"] * longest) & (n["shared"] + n["unique"] <= engine.blocks)
        fits = fits & (n["shared"] <= n["tokens"] // 2 * longest)  # two tokens read each context
        return fits & (n["logits"] <= n["tokens"])

    def cost(n: Mapping[str, Any]) -> Any:
        prompt = n["tokens"] * (time.token + time.pair * (n["tokens"] + size * n["shared"]))
        return prompt + time.block_slot * size * n["unique"]

    return StepKind("engine", axes, legal, CostModel(cost), {"shared": longest})


def _decode(engine: SimulatedEngine, context: int) -> StepKind:
    time, longest = engine.time, _longest(engine, context)
    read = time.block_slot * engine.block_size
    return StepKind(
        "decode",
        (
            Axis("sequences", 1, engine.max_seqs),
            Axis("blocks", 1, min(engine.blocks, engine.max_seqs * longest)),
        ),
        lambda n: (n["sequences"] <= n["blocks"]) & (n["blocks"] <= n["sequences"] * longest),
        CostModel(lambda n: time.token * n["sequences"] + read * n["blocks"]),
        steps=SeparateSteps,
    )


def _prefill(engine: SimulatedEngine, context: int) -> StepKind:
    time, size = engine.time, engine.block_size
    return StepKind(
        "prefill",
        (Axis("tokens", 1, engine.max_tokens), Axis("context", 0, _longest(engine, context))),
        lambda n: n["tokens"] + (n["context"] - 1) * size < context,
        CostModel(
            lambda n: n["tokens"] * (time.token + time.pair * (n["tokens"] + size * n["context"]))
        ),
        steps=SeparateSteps,
    )


def _longest(engine: SimulatedEngine, context: int) -> int:
    return min(-(-context // engine.block_size), engine.blocks)


KINDS: Mapping[str, Callable[[SimulatedEngine, int], StepKind]] = {
    "engine": _engine,
    "table": _table,
    "decode": _decode,
    "prefill": _prefill,
}
"""Steps of the portable kernel, over (tokens, shared, unique, logits); of the native one, which
reads block tables, over (tokens, requests); and of engines that separate them: decodes, over
(sequences, distinct blocks that they read), and prompt chunks, over (tokens, cached blocks of their
context)."""


def step_kind(name: str, engine: SimulatedEngine, context: int) -> StepKind:
    """Return one of `KINDS` within the limits of an engine.

    Args:
        name: of the kind.
        engine: sizes and speed.
        context: longest prompt plus generation, in tokens.

    Raises:
        ValueError: an unknown name, or a context below 2.
    """
    if name not in KINDS:
        raise ValueError(f"unknown kind of steps {name!r}; expected one of {', '.join(KINDS)}")
    if context < 2:
        raise ValueError(f"expected a context of at least 2 tokens, got {context}: raise it")
    return KINDS[name](engine, context)
