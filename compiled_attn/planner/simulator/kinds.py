"""The kinds of steps an engine captures graphs for: axes, what is legal, what it costs.

Ours, and those of engines that keep decodes and prefills apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from compiled_attn.planner import CostModel, Demand
from compiled_attn.planner.simulator.simulate import SimulatedEngine
from compiled_attn.planner.simulator.steps import SeparateSteps, SimulatedSteps
from graphs.buckets.axes import Axis

__all__ = ["FAMILIES", "Family", "family", "within"]

FAMILIES = ("engine", "table")
"""Steps of the portable kernel, over (tokens, shared, unique, logits), and of the native one, which
reads block tables, over (tokens, requests)."""

_USUAL_SHARE = 0.005


@dataclass(frozen=True)
class Family:
    """Steps of one kind.

    Args:
        name: of the simulated needs.
        axes: with the engine's limits.
        legal: which needs within the limits can occur, numbers or arrays by axis.
        cost: of a bucket, in seconds of the simulated device without its constant part.
        usual: sizes up to which the field lays its ladders out where the limit is hardly ever met:
            the shared blocks of one context, while a step may read those of several.
        steps: what a simulated step computes.
    """

    name: str
    axes: tuple[Axis, ...]
    legal: Callable[[Mapping[str, Any]], Any]
    cost: CostModel
    usual: Mapping[str, int] = field(default_factory=dict)
    steps: type[SimulatedSteps] = SimulatedSteps

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return tuple(axis.name for axis in self.axes)

    def foreseen(self, demand: Demand) -> Demand:
        """The demand and the largest usual step, at a small share of its cost.

        A record rarely has that step, and without it all that comes close to it tomorrow pays for
        the largest step of all.
        """
        if not self.usual:
            return demand
        largest = np.array([[self.usual.get(axis.name, axis.high) for axis in self.axes]])
        cost = float(self.cost.of(self.names, demand.points) @ demand.weights)
        weight = _USUAL_SHARE * cost / float(self.cost.of(self.names, largest)[0])
        points = np.concatenate([demand.points, largest])
        return Demand(self.names, points, np.append(demand.weights, weight))


def family(name: str, engine: SimulatedEngine, context: int) -> Family:
    """A family within the limits of an engine.

    Args:
        name: one of `FAMILIES`.
        engine: sizes, and how long steps take.
        context: longest prompt plus generation, in tokens.

    Raises:
        ValueError: an unknown name, or a context below 2.
    """
    if name not in FAMILIES:
        raise ValueError(f"unknown family {name!r}; expected one of {', '.join(FAMILIES)}")
    if context < 2:
        raise ValueError(f"expected a context of at least 2 tokens, got {context}: raise it")
    longest = min(-(-context // engine.block_size), engine.blocks)
    return _table(engine) if name == "table" else _engine(engine, longest)


def within(demand: Demand, axes: Sequence[Axis]) -> tuple[Demand, float]:
    """The needs that fit the axes, over these in their order, and the share of the others.

    The engine cuts a step that no bucket holds into smaller ones.

    Raises:
        ValueError: no need fits, or an axis is missing.
    """
    projected = demand.project([axis.name for axis in axes])
    fits = (projected.points <= [axis.high for axis in axes]).all(axis=1)
    if not fits.any():
        limits = ", ".join(f"{axis.name} <= {axis.high}" for axis in axes)
        raise ValueError(f"expected needs with {limits}, got none: raise the limits")
    kept = Demand(projected.names, projected.points[fits], projected.weights[fits])
    return kept, 1 - kept.total / demand.total


def _table(engine: SimulatedEngine) -> Family:
    return Family(
        "table",
        (Axis("tokens", 1, engine.max_tokens), Axis("requests", 1, engine.max_seqs)),
        lambda n: n["requests"] <= n["tokens"],
        CostModel(lambda n: engine.time.token * (n["tokens"] + n["requests"])),
    )


def _engine(engine: SimulatedEngine, longest: int) -> Family:
    time, size = engine.time, engine.block_size
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

    return Family("engine", axes, legal, CostModel(cost), {"shared": longest})


def decode(engine: SimulatedEngine, context: int) -> Family:
    """Over sequences and the distinct blocks that they read."""
    time, longest = engine.time, _longest(engine, context)
    read = time.block_slot * engine.block_size
    return Family(
        "decode",
        (
            Axis("sequences", 1, engine.max_seqs),
            Axis("blocks", 1, min(engine.blocks, engine.max_seqs * longest)),
        ),
        lambda n: (n["sequences"] <= n["blocks"]) & (n["blocks"] <= n["sequences"] * longest),
        CostModel(lambda n: time.token * n["sequences"] + read * n["blocks"]),
        steps=SeparateSteps,
    )


def prefill(engine: SimulatedEngine, context: int) -> Family:
    """Over the tokens of a chunk and the blocks that its prompt has in the cache."""
    time, size = engine.time, engine.block_size
    return Family(
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
