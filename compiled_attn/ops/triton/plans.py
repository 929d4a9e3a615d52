"""The plans of this process: those that were measured, and the usual ones of all other problems."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import torch

from compiled_attn.ops.triton.tiles import Chip, Plan, Problem, Tile, plan
from compiled_attn.ops.triton.varlen_calls import VarlenCalls

__all__ = ["PLANS", "Plans", "chip_of"]

_UNKNOWN = Chip(132, is_hopper=False)  # where no device tells


class Plans:
    """Plans by devices and problems.

    Attributes:
        measure: gives the plan of a problem that has none yet; None, as it is but for a warmup
            (`autotune.measuring`): such a problem has the usual plan.
        varlen: calls of the last warmup.
    """

    def __init__(self) -> None:
        self.measure: Callable[[Problem, torch.device], Plan] | None = None
        self.varlen = VarlenCalls()
        self._measured: dict[tuple[torch.device, Problem], Plan] = {}

    def of(self, problem: Problem, device: torch.device) -> Plan:
        """The plan that was measured of a problem, or the usual one."""
        found = self._measured.get((device, problem))
        if found is None and self.measure and not _is_capturing(device):
            found = self._measured[device, problem] = self.measure(problem, device)
        return found or _usual(problem, device)

    def kept(self, device: torch.device) -> dict[str, list[int]]:
        """What was measured on a device, as JSON by the names of problems: rows, keys, warps,
        stages, splits, and 1 for varlen or 0."""
        return {
            problem.name: [*tile, splits, int(varlen)]
            for (where, problem), (tile, splits, varlen) in self._measured.items()
            if where == device
        }

    def adopt(self, kept: Mapping[str, list[int]], device: torch.device) -> None:
        """Takes for a device what `kept` gave, of an earlier process on the same kind of device.

        Raises:
            ValueError: it is none of it.
        """
        plans: dict[tuple[torch.device, Problem], Plan] = {}
        for name, numbers in kept.items():
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
"""Those that the ops take: torch keeps one op a name, and so one table of plans."""


def chip_of(device: torch.device) -> Chip:
    """What plans depend on of a device."""
    if device.type != "cuda":
        return _UNKNOWN
    found = torch.cuda.get_device_properties(device)
    return Chip(found.multi_processor_count, not torch.version.hip and found.major == 9)


@lru_cache(maxsize=4096)
def _usual(problem: Problem, device: torch.device) -> Plan:
    return plan(problem, chip_of(device))


def _is_capturing(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
