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
from compiled_attn.ops.call import NewTokens, PagedCall
from compiled_attn.ops.providers import PROVIDERS, UNPROVEN
from compiled_attn.ops.triton.arguments import CODES
from compiled_attn.ops.triton.launch import attend, compile_plan
from compiled_attn.ops.triton.plans import PLANS, REFUSED, Plans, chip_of, failed
from compiled_attn.ops.triton.tiles import Plan, Problem, other_splits, other_tiles, plan

__all__ = ["call_of", "measuring", "new_tokens", "tune"]

_COLD_BYTES = 1 << 28  # of keys and of values: more than any L2 cache
_ROUNDS = 7
_MAX_ERROR = 0.05  # many roundings of bfloat16, less than another scale or mask makes

_log = logging.getLogger(__name__)

Clock = Callable[[Callable[[], object]], float]
"""Times a call, in any unit."""


@contextmanager
def measuring(plans: Plans = PLANS) -> Iterator[Plans]:
    """While open, the op measures each problem it meets for the first time.

    For warmups, which run each bucket before capturing it. `Plans.export` and `Plans.adopt` carry
    the results to later processes.
    """
    plans.measure, plans.kinds = tune, {}
    try:
        yield plans
    finally:
        plans.measure = None


def tune(problem: Problem, device: torch.device, clock: Clock | None = None) -> Plan:
    """Returns the fastest plan of a problem: tries tiles, then splits, then providers."""
    clock, chip = clock or partial(_milliseconds, device=device), chip_of(device)
    usual = plan(problem, chip)
    try:
        call = call_of(problem, device)
    except torch.OutOfMemoryError:  # caches take most memory: must not fail the warmup
        for name in PROVIDERS:
            REFUSED[device, problem, name] = "was not measured: the device is out of memory", None
        return usual
    best = _fastest([usual, *other_tiles(problem, chip)], call, clock)
    return _or_provider(problem, _fastest([best, *other_splits(best)], call, clock), call, clock)


def call_of(problem: Problem, device: torch.device) -> PagedCall:
    """Returns a random call whose requests are equal and half as long as they can be, or as long
    as their new tokens."""
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
    length = min(max((problem.keys + 1) // 2, -(-problem.tokens // requests)), problem.keys)
    lengths = torch.full((requests,), length, device=device, dtype=torch.int32)
    call = PagedCall(
        torch.randn(problem.tokens, heads, problem.key_dim, device=device).to(dtype),
        _random((*cells, problem.key_dim), stored, device),
        _random((*cells, problem.value_dim), stored, device),
        table, lengths, starts.int(), Scoring(problem.key_dim**-0.5), True, scale, scale,
    )  # fmt: skip
    return call._replace(new=new_tokens(call))


def new_tokens(call: PagedCall) -> NewTokens:
    """Returns the last tokens of each request, as they are in the caches."""
    starts, (_, page, kv_heads, _) = call.query_start_loc, call.key_cache.shape
    row = torch.arange(call.query.shape[0], device=call.query.device)
    request = torch.searchsorted(starts, row, right=True) - 1
    at = (call.seq_lens[request] - starts[request + 1] + row).clamp(min=0)
    block, slot = call.block_table[request, at // page], at % page
    key, value = (
        torch.randn(len(row), kv_heads, cache.shape[3], device=row.device).to(call.query.dtype)
        if call.key_scale is not None
        else cache[block, slot]
        for cache in (call.key_cache, call.value_cache)
    )
    return NewTokens(key, value, block.long() * page + slot)


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


def _or_provider(problem: Problem, best: Plan, call: PagedCall, clock: Clock) -> Plan:
    """Returns the plan with the fastest kernel: Triton's, or a provider that can serve the call."""
    device, times = call.query.device, dict[Plan, float]()
    for name, provider in PROVIDERS.items():
        if lacks := provider.why_not(call):
            _log.info("%s is not measured: it %s", name, lacks)
            continue
        if name in UNPROVEN:
            REFUSED[device, problem, name] = "was not run on a device yet", None
            continue
        plan = best._replace(kernel=name)
        try:
            times[plan] = clock(partial(attend, call, plan))
            _check(attend(call, plan), attend(call, best))
        except Exception as error:  # libraries report some limits only when called, by any type
            times.pop(plan, None)
            REFUSED[device, problem, name] = failed(name, error), None
    if not times:
        return best
    times = {best: clock(partial(attend, call, best)), **times}
    fastest = min(times, key=times.__getitem__)
    for plan in times.keys() - {best, fastest}:
        speed = times[fastest] / times[plan]
        REFUSED[device, problem, plan.kernel] = f"was slower than {fastest.kernel}", speed
    return fastest


def _check(results: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    """Raises unless results are about Triton's: libraries change what their arguments mean."""
    (out, lse), (want, want_lse) = results, wanted
    error = float((out - want).abs().max() / want.abs().max())
    lse_error = float((lse - want_lse).abs().max())
    if not (error <= _MAX_ERROR and lse_error <= _MAX_ERROR):  # or NaN
        raise ArithmeticError(f"out differs by {error:.2g} from Triton's, lse by {lse_error:.2g}")


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
