"""The plans of this process: measured ones, and defaults for all other problems."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import lru_cache

import torch

from compiled_attn.ops.triton.tiles import Chip, Plan, Problem, Tile, plan

__all__ = ["PLANS", "REFUSED", "Plans", "chip_of", "varlen_notes"]

_UNKNOWN = Chip(132, is_hopper=False)  # without a CUDA device

REFUSED: dict[tuple[torch.device, Problem], str] = {}
"""Why a problem could not be measured with varlen in this process."""


def varlen_notes(kinds: Collection[tuple[Problem, str | None]]) -> dict[str, str]:
    """Returns a note "varlen" for the report: kinds of calls, and why some are not served."""
    if not kinds:
        return {}
    reasons = [why_not for _, why_not in kinds]
    notes = [f"serves {reasons.count(None)} of {len(reasons)} kinds of calls"]
    unique = dict.fromkeys(why for why in reasons if why is not None)
    notes += [f"{reasons.count(why)} not, as it {why}" for why in unique]
    return {"varlen": "; ".join(notes)}


class Plans:
    """Plans by device and problem.

    Attributes:
        measure: measures the plan of a new problem; None, except during a warmup
            (`autotune.measuring`): uses the default plan.
        varlen: kinds of calls of the last warmup in order: the sizes of a bucket, and why varlen
            does not support them or None.
    """

    def __init__(self) -> None:
        self.measure: Callable[[Problem, torch.device], Plan] | None = None
        self.varlen: dict[tuple[Problem, str | None], None] = {}
        self._measured: dict[tuple[torch.device, Problem], Plan] = {}

    def of(self, problem: Problem, device: torch.device) -> Plan:
        """Returns the measured plan of a problem, or the default."""
        found = self._measured.get((device, problem))
        if found is None and self.measure and not _is_capturing(device):
            found = self._measured[device, problem] = self.measure(problem, device)
        return found or _default(problem, device)

    def export(self, device: torch.device) -> dict[str, list[int]]:
        """Returns a device's measured plans for JSON, by problem name: rows, keys, warps, stages,
        splits, and 1 for varlen or 0."""
        return {
            problem.name: [*tile, splits, int(varlen)]
            for (where, problem), (tile, splits, varlen) in self._measured.items()
            if where == device
        }

    def adopt(self, exported: Mapping[str, list[int]], device: torch.device) -> None:
        """Adopts what `export` returned on the same kind of device.

        Raises:
            ValueError: invalid plans.
        """
        plans: dict[tuple[torch.device, Problem], Plan] = {}
        for name, numbers in exported.items():
            are_sizes = all(type(each) is int and each > 0 for each in numbers[:5])
            is_plan = len(numbers) == 6 and are_sizes and numbers[5] in (0, 1)
            if not is_plan or any(size & (size - 1) for size in numbers[:3]):
                raise ValueError(
                    "expected rows, keys, warps (powers of two), stages, splits and 0 or 1 of "
                    f"{name!r}, got {numbers!r}: measure again"
                )
            *tile, splits, is_varlen = numbers
            plans[device, Problem.named(name)] = Plan(Tile(*tile), splits, bool(is_varlen))
        self._measured |= plans


PLANS = Plans()
"""The plans used by the ops: global, as torch's ops are."""


def chip_of(device: torch.device) -> Chip:
    """Returns the properties of a device that plans depend on."""
    if device.type != "cuda":
        return _UNKNOWN
    found = torch.cuda.get_device_properties(device)
    return Chip(found.multi_processor_count, not torch.version.hip and found.major == 9)


@lru_cache(maxsize=4096)
def _default(problem: Problem, device: torch.device) -> Plan:
    return plan(problem, chip_of(device))


def _is_capturing(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
