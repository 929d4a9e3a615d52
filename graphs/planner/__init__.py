"""Plans bucket sets: from a demand, a cost and a budget to the least expected padding."""

from __future__ import annotations

from graphs.planner.budget import Budget
from graphs.planner.cost import CostModel
from graphs.planner.demand import Demand
from graphs.planner.demand_file import DemandFileError, DemandRecorder, read_demand, write_demand
from graphs.planner.drift import DriftWatch
from graphs.planner.judge import BucketUse, Judgement, judge
from graphs.planner.part import Part
from graphs.planner.planning import plan, plan_together
from graphs.planner.report import PlanReport

__all__ = [
    "BucketUse",
    "Budget",
    "CostModel",
    "Demand",
    "DemandFileError",
    "DemandRecorder",
    "DriftWatch",
    "Judgement",
    "Part",
    "PlanReport",
    "judge",
    "plan",
    "plan_together",
    "read_demand",
    "write_demand",
]
