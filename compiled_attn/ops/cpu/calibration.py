"""Measures the fastest `KernelTuning` of this machine, once per library.

Takes about a second on first use. Measures CPU seconds of one thread; a setting must beat the best
guess twice, by 5 %, or by 2 % where each is measured more often.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from compiled_attn.ops import packed_linear
from compiled_attn.ops.cpu import kernel_tuning
from compiled_attn.ops.cpu.build import path_of_part
from compiled_attn.ops.cpu.kernel_tuning import CACHES, PREFETCH_KIB, KernelTuning, TuningResult
from compiled_attn.ops.cpu.libraries import kernel_tuning_file
from compiled_attn.ops.timing import medians
from graphs.errors import StoreBusy
from graphs.store.lock import locked

__all__ = ["calibrate", "load_or_calibrate", "load_or_calibrate_16bit"]

_MIN_GAIN, _ROUNDS = 1.05, 5
_SMALL_GAIN, _MANY_ROUNDS = 1.02, 15
_LOCK_SECONDS = 30.0

_OF_16BIT = ("decode", "prefill", "prefetch", "prefetch_kib")  # of their caches alone, or first
_HEADS, _KV_HEADS, _DIM, _PAGE = 32, 8, 128, 16
_REQUESTS, _PAGES = 16, 64  # caches of 64 MiB, more than most processors' last cache
_PROMPT = 384
_LAYERS, _WIDTH = 32, 1024  # 64 MiB too
_LAYER_ROWS = ((1, 16), (16, 16), (256, 2))
_PREFETCH_ROWS = {"linear_prefetch": 16, "linear_prefetch_once": 1}


def load_or_calibrate(library: Path, isa: str, ops: Any, *, divided: bool = False) -> TuningResult:
    """Applies the tuning saved next to a library; measures and saves it on first use.

    Processes wait for the one that measures, so that all compute the same bits. Uses the best guess
    where nothing can be saved.

    Args:
        library: its path.
        isa: its instruction set.
        ops: those of the loaded library, below ``torch.ops``.
        divided: it has only kernels of float32 caches, which `load_or_calibrate_16bit` adds to.
    """
    measure = partial(_measure, library, isa, ops, has_16bit=not divided)
    result = _saved(library, isa, measure, TuningResult(KernelTuning.default(isa)))
    kernel_tuning.apply(library, result.tuning)
    return result


def load_or_calibrate_16bit(
    library: Path, isa: str, ops: Any, others: TuningResult
) -> TuningResult:
    """As `load_or_calibrate`, of the attention of a divided library with 16-bit caches.

    Args:
        library, isa, ops: see `load_or_calibrate`.
        others: the result without them.
    """
    measure = partial(_measure_16bit, library, isa, ops, others)
    found = _saved(path_of_part(library, 16), isa, measure, others)
    own = {name: getattr(found.tuning, name) for name in _OF_16BIT}
    result = TuningResult(replace(others.tuning, **own), {**others.ratios, **found.ratios})
    kernel_tuning.apply(library, result.tuning)
    return result


def _saved(
    library: Path, isa: str, measure: Callable[[], TuningResult], guess: TuningResult
) -> TuningResult:
    result = kernel_tuning.read(library, isa)
    if result is None:
        lock = kernel_tuning_file(library).with_suffix(".lock")
        try:
            with locked(lock, shared=False, seconds=_LOCK_SECONDS):
                result = kernel_tuning.read(library, isa) or measure()
                kernel_tuning.write(library, result)
        except (OSError, StoreBusy):  # read-only folders must work too
            result = guess
    return result


def calibrate(library: Path, isa: str, ops: Any) -> TuningResult:
    """Measures again, applies the fastest tuning and saves it if possible."""
    result = _measure(library, isa, ops)
    kernel_tuning.apply(library, result.tuning)
    with suppress(OSError):
        kernel_tuning.write(library, result)
    return result


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _measure(library: Path, isa: str, ops: Any, *, has_16bit: bool = True) -> TuningResult:
    kinds = kernel_tuning.dot_kinds(isa)
    search = _Search(library, KernelTuning.default(isa))
    with _calm():
        if has_16bit:
            _search_16bit(search, kinds, ops)
        else:  # caches of as many bytes
            _search_prefetch(search, _decode(ops, _PAGES // 2, torch.float32))
        weights = [packed_linear.pack(_random(_WIDTH, _WIDTH)) for _ in range(_LAYERS)]
        float32_weights = [weight.view(torch.int16) for weight in weights]
        if len(kinds) > 1:
            search.among([{"linear": each} for each in kinds], _layers(ops, weights))
        for name, rows in _PREFETCH_ROWS.items():
            both = [_layers(ops, each, [(rows, _LAYERS)]) for each in (weights, float32_weights)]
            options = [{name: cache} for cache in ("L1", "L2")]
            search.among(options, partial(_call_all, both), _SMALL_GAIN, _MANY_ROUNDS)
        # Last, since "amx" would hide the difference between prefetches.
        of_bf16_weights = kernel_tuning.bf16_weight_dot_kinds(isa)
        search.among(
            [{"linear_bf16_weights": each} for each in of_bf16_weights],
            _layers(ops, float32_weights),
        )
    return TuningResult(search.best, search.ratios)


def _measure_16bit(library: Path, isa: str, ops: Any, others: TuningResult) -> TuningResult:
    guess = KernelTuning.default(isa)
    own = {name: getattr(guess, name) for name in _OF_16BIT}
    search = _Search(library, replace(others.tuning, **own))
    with _calm():
        _search_16bit(search, kernel_tuning.dot_kinds(isa), ops)
    return TuningResult(search.best, search.ratios)


@contextmanager
def _calm() -> Iterator[None]:
    # The first use may be inside a trace, whose tensors have no data.
    with _disable_current_modes(), torch.no_grad(), _one_thread():
        yield


def _search_16bit(search: _Search, kinds: Sequence[str], ops: Any) -> None:
    decode = _decode(ops)
    search.among([{"decode": each} for each in kinds if each != "amx"], decode)
    _search_prefetch(search, decode)
    if len(kinds) > 1:
        search.among([{"prefill": each} for each in kinds], _prefill(ops))


def _search_prefetch(search: _Search, decode: Callable[[], object]) -> None:
    prefetches = product(CACHES, PREFETCH_KIB)
    search.among([{"prefetch": cache, "prefetch_kib": kib} for cache, kib in prefetches], decode)


class _Search:
    """Coordinate descent over settings.

    Attributes:
        best: the fastest so far.
        ratios: speed of the others relative to the best before them.
    """

    def __init__(self, library: Path, best: KernelTuning) -> None:
        self._library = library
        self.best = best
        self.ratios: dict[str, float] = {}

    def among(
        self,
        changes: Sequence[dict[str, Any]],
        call: Callable[[], object],
        min_gain: float = _MIN_GAIN,
        rounds: int = _ROUNDS,
    ) -> None:
        """Measures changes to the best, the first of which changes nothing; selects the fastest."""
        options = [replace(self.best, **change) for change in changes]
        if len(options) == 1:
            return
        gains = self._gains(options, call, rounds)
        for change, gain in zip(changes[1:], gains[1:], strict=True):
            name = ", ".join(f"{name} {value}" for name, value in change.items())
            self.ratios[name] = round(gain, 3)
        fastest = options[gains.index(max(gains))]
        if min(max(gains), self._gains((self.best, fastest), call, rounds)[1]) >= min_gain:
            self.best = fastest

    def _gains(
        self, options: Sequence[KernelTuning], call: Callable[[], object], rounds: int
    ) -> list[float]:
        """Speed of each relative to the first."""
        runs = [partial(self._run, each, call) for each in options]
        first, *others = medians(runs, rounds, time.thread_time)
        return [1.0, *(first / each for each in others)]

    def _run(self, tuning: KernelTuning, call: Callable[[], object]) -> None:
        kernel_tuning.apply(self._library, tuning)
        call()


def _decode(
    ops: Any, width: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> Callable[[], object]:
    """One token per request, pages in random order."""
    width = _PAGES if width is None else width
    pages = torch.randperm(_REQUESTS * width, generator=_generator(), device="cpu").int()
    lengths = torch.full((_REQUESTS,), width * _PAGE, dtype=torch.int32, device="cpu")
    starts = torch.arange(_REQUESTS + 1, dtype=torch.int32, device="cpu")
    caches = (_random(_REQUESTS * width, _PAGE, _KV_HEADS, _DIM).to(dtype) for _ in range(2))
    query = _random(_REQUESTS, _HEADS, _DIM).to(dtype)
    table = pages.view(_REQUESTS, width)
    return partial(ops.paged_attention, query, *caches, table, lengths, starts, _DIM**-0.5)


def _prefill(ops: Any) -> Callable[[], object]:
    """A prompt with a quarter of the heads."""
    pages = torch.arange(_PROMPT // _PAGE, dtype=torch.int32, device="cpu")[None]
    length = torch.tensor([_PROMPT], dtype=torch.int32, device="cpu")
    starts = torch.tensor([0, _PROMPT], dtype=torch.int32, device="cpu")
    caches = (_random(_PROMPT // _PAGE, _PAGE, _KV_HEADS // 4, _DIM) for _ in range(2))
    query = _random(_PROMPT, _HEADS // 4, _DIM)
    return partial(ops.paged_attention, query, *caches, pages, length, starts, _DIM**-0.5)


def _layers(
    ops: Any, weights: list[Tensor], layer_rows: Sequence[tuple[int, int]] = _LAYER_ROWS
) -> Callable[[], object]:
    """Rows of a decode, of a few requests, and of a prompt."""
    dtype = torch.float32 if weights[0].dtype is torch.int16 else weights[0].dtype
    inputs = [  # divided by 3 to use all bits of float32
        (_random(rows, _WIDTH).to(dtype) / 3, weights[:layers]) for rows, layers in layer_rows
    ]

    def call() -> None:
        for input, some in inputs:
            for weight in some:
                ops.packed_linear(input, weight)

    return call


def _call_all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _random(*shape: int) -> Tensor:
    """Random bfloat16, since zeros are faster; repeats a short sequence, since drawing is slow."""
    some = torch.randn(1 << 18, generator=_generator(), dtype=torch.float32, device="cpu")
    count = math.prod(shape)
    return some.bfloat16().repeat(-(-count // len(some)))[:count].view(shape)


def _generator() -> torch.Generator:
    return torch.Generator("cpu").manual_seed(0)  # leaves the user's alone
