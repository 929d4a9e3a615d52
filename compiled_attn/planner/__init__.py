"""Plans bucket sets: from a demand, a cost and a budget to the least expected padding."""

from __future__ import annotations

from compiled_attn.errors import DemandFileError
from compiled_attn.planner.cost import CostModel
from compiled_attn.planner.demand import Demand, read_demand
from compiled_attn.planner.judge import BucketUse, Judgement, PlanReport, judge
from compiled_attn.planner.pick import by_cost, by_size
from compiled_attn.planner.planning import Budget, plan

__all__ = [
    "BucketUse",
    "Budget",
    "CostModel",
    "Demand",
    "DemandFileError",
    "Judgement",
    "PlanReport",
    "by_cost",
    "by_size",
    "judge",
    "plan",
    "read_demand",
]
