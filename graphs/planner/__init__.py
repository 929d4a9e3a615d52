"""The planner of bucket sets: from a demand, a cost and a budget to the least expected padding."""

from __future__ import annotations

from graphs.errors import DemandFileError
from graphs.planner.cost import CostModel
from graphs.planner.demand import Demand, read_demand
from graphs.planner.drift import DriftReport, KindLimit, Outcome, by_cost, by_size
from graphs.planner.planning import plan
from graphs.planner.problem import Budget
from graphs.planner.report import BucketUse, DriftWatch, Judgement, PlanReport, judge

__all__ = [
    "BucketUse",
    "Budget",
    "CostModel",
    "Demand",
    "DemandFileError",
    "DriftReport",
    "DriftWatch",
    "Judgement",
    "KindLimit",
    "Outcome",
    "PlanReport",
    "by_cost",
    "by_size",
    "judge",
    "plan",
    "read_demand",
]
