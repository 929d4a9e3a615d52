"""Plans for the worst of several demands, where a ladder is what begins them."""

from __future__ import annotations

import numpy as np

from compiled_attn.planner import Demand, plan, robust
from graphs import Axis, linear


def test_the_guard_of_a_ladder_that_is_made_better_is_counted(monkeypatch):
    def beaten(task, mixed, trial):
        top = task.region.top[None]
        shares = np.full(trial.count, 1 / trial.count)
        return shares, [robust._Found(top, 0, trial.wastes(top))]

    monkeypatch.setattr(robust, "_in_rounds", beaten)
    report = plan(
        Demand(("a", "b"), [(1, 0), (8, 1)], [9, 3]),
        lambda need: 3 + need["a"] * (2 + need["b"]),
        16,
        axes=[Axis("a", 1, 12), Axis("b", 0, 12)],
        drift=True,
        ladders={"linear": linear(a=(4, 4, 12), b=(4, 4, 12))},
    )
    assert report.guards == 1 and report.guard <= 3
