"""The ops on CUDA devices: checks shapes, selects a plan, launches one or two kernels.

Arguments and results are those of `compiled_attn.ops.reference`, but indices, which are on the
device, are not checked: out of range, they give NaN or are not written.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import triton
from torch import Tensor

from compiled_attn.errors import KernelArgumentError
from compiled_attn.ops.call import NewTokens, PagedCall
from compiled_attn.ops.checks import check_shapes
from compiled_attn.ops.providers import PROVIDERS
from compiled_attn.ops.triton.arguments import (
    Launch,
    arrivals_of,
    attend_launch,
    problem_of,
    results_of,
    write_launch,
)
from compiled_attn.ops.triton.attend import attend_kernel
from compiled_attn.ops.triton.plans import PLANS, note
from compiled_attn.ops.triton.tiles import Plan
from compiled_attn.ops.triton.write import write_kernel

__all__ = ["Runner", "attend", "compile_plan", "paged_attention", "paged_attention_"]

Runner: TypeAlias = Callable[[Any, Launch], None]
"""Runs or compiles a kernel with a launch."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, *step: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """See `compiled_attn.ops.reference.paged_attention`."""
    call = PagedCall.of(query, key_cache, value_cache, *step, **options)
    _check(call)
    return attend(call)


def paged_attention_(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *step: Any,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """See `compiled_attn.ops.reference.paged_attention_`."""
    new = NewTokens(key, value, slot_mapping)
    call = PagedCall.of(query, key_cache, value_cache, *step, new=new, **options)
    _check(call)
    plan = _plan_of(call)
    arrivals = arrivals_of(call, plan)
    with _device(query):
        _run(write_kernel, write_launch(call, new, arrivals))
    return _attend(call, plan, arrivals, is_measured=True)


def attend(call: PagedCall, plan: Plan | None = None) -> tuple[Tensor, Tensor]:
    """Computes a call with valid shapes; plan: None: the measured one, or the default."""
    return _attend(call, plan or _plan_of(call), None, is_measured=plan is None)


def _attend(
    call: PagedCall, plan: Plan, arrivals: Tensor | None, *, is_measured: bool
) -> tuple[Tensor, Tensor]:
    """``arrivals``: those of `arrivals_of`, zeroed; None: zeroes some where they are needed."""
    provider = PROVIDERS.get(plan.kernel)
    if provider is None or provider.why_not(call) is not None:
        return _launch(call, plan, _run, arrivals)
    paged = functools.partial(_launch, plan=plan, run=_run)
    try:
        with _device(call.query):
            return provider.attend(call, paged)
    except Exception as error:  # libraries report some limits only when called, by any type
        if not is_measured or PLANS.measure is None:
            raise
        PLANS.refuse(problem_of(call), call.query.device, error)
        return paged(call)


def compile_plan(call: PagedCall, plan: Plan) -> None:
    """Compiles the kernels of a plan without running them; thread-safe."""
    _launch(call, plan, _compile, arrivals_of(call, plan))


def _launch(
    call: PagedCall, plan: Plan, run: Runner, arrivals: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    is_interpreted = not isinstance(attend_kernel, triton.JITFunction)
    widen = is_interpreted and call.query.dtype == torch.bfloat16  # triton issue 11584
    has_fp8 = not is_interpreted and _converts_fp8(call.query.device)
    if arrivals is None and (arrivals := arrivals_of(call, plan)) is not None:
        # Per call, not reset by the last program: graphs replayed on two streams would share
        # persistent counters, and one wrong count would spoil all later calls.
        arrivals.zero_()
    results = results_of(call, plan, arrivals)
    with _device(call.query):
        run(attend_kernel, attend_launch(call, plan, results, widen=widen, has_fp8=has_fp8))
    return results.out, results.lse


def _plan_of(call: PagedCall) -> Plan:
    problem = problem_of(call)
    plan = PLANS.of(problem, call.query.device)
    if PLANS.measure is not None:
        note(PLANS, call, problem, plan)
    return plan


def _check(call: PagedCall) -> None:
    if call.segment is not None:
        raise KernelArgumentError(
            f"paged_attention: expected segment None on {call.query.device.type}, got "
            f"{call.segment}: it is for the kernels of the CPU"
        )
    check_shapes(call)
    if call.query.dtype not in _DTYPES:
        raise KernelArgumentError(
            f"paged_attention: expected a query of float32, bfloat16 or float16 on "
            f"{call.query.device}, got {call.query.dtype}: convert it with .to()"
        )


@functools.cache
def _converts_fp8(device: torch.device) -> bool:
    is_nvidia = device.type == "cuda" and not torch.version.hip
    return is_nvidia and torch.cuda.get_device_capability(device) >= (8, 9)


def _run(kernel: Any, launch: Launch) -> None:
    if all(launch.grid):
        kernel[launch.grid](**launch.arguments, **launch.options)


def _compile(kernel: Any, launch: Launch) -> None:
    if all(launch.grid) and isinstance(kernel, triton.JITFunction):  # else it is interpreted
        kernel.warmup(grid=launch.grid, **launch.arguments, **launch.options)


def _device(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
