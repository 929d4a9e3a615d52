"""The plans of this process: measured ones, and defaults for all other problems."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TypeAlias

import torch

from compiled_attn.ops.call import PagedCall
from compiled_attn.ops.providers import PROVIDERS
from compiled_attn.ops.triton.tiles import Chip, Plan, Problem, Tile, plan

__all__ = [
    "PLANS", "REFUSED", "Exported", "Plans", "Refusal", "chip_of", "failed", "note",
    "provider_notes",
]  # fmt: skip

_log = logging.getLogger(__name__)

_UNKNOWN = Chip(132, is_hopper=False)  # without a CUDA device

Refusal: TypeAlias = tuple[str, float | None]
"""Why a provider is not used, and its speed as a share of the fastest kernel's if measured."""

REFUSED: dict[tuple[torch.device, Problem, str], Refusal] = {}
"""Why a measurement in this process refused a provider for a problem."""

Kind: TypeAlias = tuple[str, Problem, str | None]
"""A provider, the sizes of a bucket, and why the provider does not serve the call or None."""

Exported: TypeAlias = list[int | str]
"""A plan in JSON: rows, keys, warps, stages, splits, kernel."""


def failed(name: str, error: Exception) -> str:
    """Returns the first line of what a provider raised as the reason not to use it."""
    reason = f"failed: {str(error).partition(chr(10))[0] or type(error).__name__}"
    _log.warning("%s is not used: it %s", name, reason)
    return reason


def note(plans: Plans, call: PagedCall, problem: Problem, plan: Plan) -> None:
    """Notes for the report which providers serve a call of a warmup, and why others do not."""
    for name, provider in PROVIDERS.items():
        unmeasured = f"was not faster than {plan.kernel} when it was measured", None
        reason, speed = provider.why_not(call), None
        if reason is None and plan.kernel != name:
            reason, speed = REFUSED.get((call.query.device, problem, name), unmeasured)
        plans.kinds[name, problem, reason] = speed


def provider_notes(kinds: Mapping[Kind, float | None]) -> dict[str, str]:
    """Returns notes for the report by provider: kinds of calls, and why some are not served."""
    notes: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for name, *_ in kinds):
        own = [(reason, speed) for (each, _, reason), speed in kinds.items() if each == name]
        reasons = [reason for reason, _ in own]
        notes[name] = [f"serves {reasons.count(None)} of {len(own)} kinds of calls"]
        for reason in dict.fromkeys(each for each in reasons if each is not None):
            speeds = sorted(speed for each, speed in own if each == reason and speed is not None)
            by = f": {_span(speeds)} of its speed" if speeds else ""
            notes[name].append(f"{reasons.count(reason)} not, as it {reason}{by}")
    return {name: "; ".join(each) for name, each in notes.items()}


def _span(speeds: list[float]) -> str:
    return " to ".join(dict.fromkeys(f"{each:.2f}" for each in (speeds[0], speeds[-1])))


class Plans:
    """Plans by device and problem.

    Attributes:
        measure: measures the plan of a new problem; None, except during a warmup
            (`autotune.measuring`): uses the default plan.
        kinds: kinds of calls of the last warmup in order, with the speed of providers that were
            slower.
    """

    def __init__(self) -> None:
        self.measure: Callable[[Problem, torch.device], Plan] | None = None
        self.kinds: dict[Kind, float | None] = {}
        self._measured: dict[tuple[torch.device, Problem], Plan] = {}

    def of(self, problem: Problem, device: torch.device) -> Plan:
        """Returns the measured plan of a problem, or the default."""
        found = self._measured.get((device, problem))
        if found is None and self.measure and not _is_capturing(device):
            found = self._measured[device, problem] = self.measure(problem, device)
        return found or _default(problem, device)

    def refuse(self, problem: Problem, device: torch.device, error: Exception) -> None:
        """Uses Triton's kernel from now on for a problem whose provider failed in a warmup."""
        plan = self._measured[device, problem]
        self._measured[device, problem] = plan._replace(kernel="triton")
        self.kinds.pop((plan.kernel, problem, None), None)
        reason = failed(plan.kernel, error)
        REFUSED[device, problem, plan.kernel] = reason, None
        self.kinds[plan.kernel, problem, reason] = None

    def export(self, device: torch.device) -> dict[str, Exported]:
        """Returns a device's measured plans for JSON, by problem name."""
        return {
            problem.name: [*tile, splits, kernel]
            for (where, problem), (tile, splits, kernel) in self._measured.items()
            if where == device
        }

    def adopt(self, exported: Mapping[str, Exported], device: torch.device) -> None:
        """Adopts what `export` returned on the same kind of device.

        Raises:
            ValueError: invalid plans.
        """
        plans = {
            (device, Problem.named(name)): _plan(name, each) for name, each in exported.items()
        }
        self._measured |= plans


PLANS = Plans()
"""The plans used by the ops: global, as torch's ops are."""


def chip_of(device: torch.device) -> Chip:
    """Returns the properties of a device that plans depend on."""
    if device.type != "cuda":
        return _UNKNOWN
    found = torch.cuda.get_device_properties(device)
    return Chip(found.multi_processor_count, not torch.version.hip and found.major == 9)


def _plan(name: str, exported: Exported) -> Plan:
    *sizes, kernel = exported or [""]
    numbers = [each for each in sizes if type(each) is int and each > 0]
    if len(sizes) != 5 or numbers != sizes or any(each & (each - 1) for each in numbers[:3]):
        raise ValueError(
            "expected rows, keys, warps (powers of two), stages, splits and a kernel of "
            f"{name!r}, got {exported!r}: measure again"
        )
    if not isinstance(kernel, str) or kernel not in ("triton", *PROVIDERS):
        known = ", ".join(("triton", *PROVIDERS))
        raise ValueError(f"expected a kernel of {known}, got {kernel!r}: measure again")
    return Plan(Tile(*numbers[:4]), numbers[4], kernel)


@lru_cache(maxsize=4096)
def _default(problem: Problem, device: torch.device) -> Plan:
    return plan(problem, chip_of(device))


def _is_capturing(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
