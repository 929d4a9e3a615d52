"""Measures plans on the device, once per bucket, only during warmup."""

from __future__ import annotations

import logging
import os
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial

import torch
import triton
from torch import Tensor

from compiled_attn.attention.scoring import Scoring
from compiled_attn.ops import varlen
from compiled_attn.ops.call import PagedCall
from compiled_attn.ops.triton.arguments import CODES
from compiled_attn.ops.triton.launch import attend, compile_plan
from compiled_attn.ops.triton.plans import PLANS, REFUSED, Plans, chip_of
from compiled_attn.ops.triton.tiles import Plan, Problem, other_splits, other_tiles, plan

__all__ = ["call_of", "measuring", "tune"]

_COLD_BYTES = 1 << 28  # of keys and of values: more than any L2 cache
_ROUNDS = 7

_log = logging.getLogger(__name__)

Clock = Callable[[Callable[[], object]], float]
"""Times a call, in any unit."""


@contextmanager
def measuring(plans: Plans = PLANS) -> Iterator[Plans]:
    """While open, the op measures each problem it meets for the first time.

    For warmups, which run each bucket before capturing it. `Plans.export` and `Plans.adopt` carry
    the results to later processes.
    """
    plans.measure, plans.varlen = tune, {}
    try:
        yield plans
    finally:
        plans.measure = None


def tune(problem: Problem, device: torch.device, clock: Clock | None = None) -> Plan:
    """Returns the fastest plan of a problem: tries tiles, then numbers of splits, then varlen."""
    clock, chip = clock or partial(_milliseconds, device=device), chip_of(device)
    usual = plan(problem, chip)
    try:
        call = call_of(problem, device)
    except torch.OutOfMemoryError:  # caches take most memory: must not fail the warmup
        REFUSED[device, problem] = "was not measured: the device is out of memory"
        return usual
    best = _fastest([usual, *other_tiles(problem, chip)], call, clock)
    return _or_varlen(problem, _fastest([best, *other_splits(best)], call, clock), call, clock)


def call_of(problem: Problem, device: torch.device) -> PagedCall:
    """Returns a random call whose requests are equal and half as long as they can be."""
    dtype = getattr(torch, problem.dtype)
    stored = {name: each for each, name in CODES.items()}.get(problem.codes, dtype)
    requests, width = max(problem.requests, 1), problem.keys // problem.page
    cell_bytes = problem.page * problem.kv_heads * problem.key_dim * stored.itemsize
    blocks = 1 + min(requests * width, max(1, _COLD_BYTES // cell_bytes))
    cells = blocks, problem.page, problem.kv_heads
    heads = problem.kv_heads * problem.group
    scale = torch.full(cells, 0.01, device=device) if problem.codes != "none" else None
    table = torch.randint(1, blocks, (requests, width), device=device, dtype=torch.int32)
    starts = torch.arange(requests + 1, device=device) * problem.tokens // requests
    lengths = torch.full((requests,), (problem.keys + 1) // 2, device=device, dtype=torch.int32)
    return PagedCall(
        torch.randn(problem.tokens, heads, problem.key_dim, device=device).to(dtype),
        _random((*cells, problem.key_dim), stored, device),
        _random((*cells, problem.value_dim), stored, device),
        table, lengths, starts.int(), Scoring(problem.key_dim**-0.5), True, scale, scale,
    )  # fmt: skip


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype.itemsize == 1:  # codes up to 0x70 are finite in each dtype
        return torch.randint(0, 0x70, shape, device=device, dtype=torch.uint8).view(dtype)
    return torch.randn(shape, device=device, dtype=dtype)


def _fastest(plans: list[Plan], call: PagedCall, clock: Clock) -> Plan:
    _compile(plans, call)
    times: dict[Plan, float] = {}
    for each in plans:
        try:
            times[each] = clock(partial(attend, call, each))
        except (triton.OutOfResources, torch.OutOfMemoryError):
            continue
    return min(times, key=times.__getitem__, default=plans[0])


def _compile(plans: list[Plan], call: PagedCall) -> None:
    """Compiles plans concurrently: most of it runs without the GIL."""

    def one(each: Plan) -> None:
        with suppress(Exception):  # raised again when the plan is measured
            compile_plan(call, each)

    with ThreadPoolExecutor(min(len(plans), os.cpu_count() or 1)) as threads:
        list(threads.map(one, plans))


def _or_varlen(problem: Problem, best: Plan, call: PagedCall, clock: Clock) -> Plan:
    if lacks := varlen.why_not(call):
        _log.info("varlen is not measured: it %s", lacks)
        return best
    other = best._replace(varlen=True)
    try:
        times = {each: clock(partial(attend, call, each)) for each in (best, other)}
    except RuntimeError as error:  # varlen reports some limits only when called
        _log.warning("varlen is not used: %s", error)
        REFUSED[call.query.device, problem] = "failed: " + str(error).partition("\n")[0]
        return best
    return min(times, key=times.__getitem__)


def _milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """Median of some runs, after two for compilation and warmup."""
    run(), run()
    times: list[float] = []
    for _ in range(_ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(torch.cuda.current_stream(device))
        run()
        end.record(torch.cuda.current_stream(device))
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)
