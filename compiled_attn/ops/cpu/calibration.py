"""The calibration: which `Forms` of the kernels are the fastest on this machine, once a library.

About a second, at the first use. Chance shall not choose: one thread is measured, by the seconds
that it ran, and a form other than the best guess must gain twice. A small gain counts where each is
measured more often.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from compiled_attn.ops import packed_linear
from compiled_attn.ops.cpu.forms import (
    AHEAD_KIB,
    CACHES,
    Chosen,
    Forms,
    keep,
    kept,
    products_of,
    products_of_halves,
    take,
)
from compiled_attn.ops.cpu.libraries import forms_of
from compiled_attn.ops.timing import medians
from graphs.errors import StoreBusy
from graphs.store.lock import locked
from graphs.warmup.workers import one_thread

__all__ = ["calibrate", "settle"]

_LEAST_GAIN, _ROUNDS = 1.05, 5
_SMALL_GAIN, _MANY_ROUNDS = 1.02, 15
_PATIENCE_SECONDS = 30.0

_HEADS, _KV_HEADS, _DIM, _PAGE = 32, 8, 128, 16
_REQUESTS, _PAGES = 16, 64  # of each: caches of 64 MiB, more than most processors hold
_PROMPT = 384
_LAYERS, _WIDTH = 32, 1024  # 64 MiB too
_ROWS_OF_LAYERS = ((1, 16), (16, 16), (256, 2))
_ROWS_OF_ASKING = {"linear_asks": 16, "linear_asks_once": 1}


def settle(library: Path, isa: str, ops: Any) -> Chosen:
    """Takes the forms that are kept beside a library; at its first use those that are measured.

    Processes that want the same wait for the one that measures, so that all compute the same bits.
    Where nothing can be kept, it is the best guess.

    Args:
        library: loaded.
        isa: its instruction set.
        ops: its ops, below ``torch.ops``.
    """
    chosen = kept(library, isa)
    if chosen is None:
        try:
            with locked(
                forms_of(library).with_suffix(".lock"), shared=False, seconds=_PATIENCE_SECONDS
            ):
                chosen = kept(library, isa) or _measured(library, isa, ops)
                keep(library, chosen)
        except (OSError, StoreBusy):  # a folder that is only read serves too
            chosen = Chosen(Forms.of(isa))
    take(library, chosen.forms)
    return chosen


def calibrate(library: Path, isa: str, ops: Any) -> Chosen:
    """Measures again, takes what is fastest now and keeps it, if it can be, for later processes."""
    chosen = _measured(library, isa, ops)
    take(library, chosen.forms)
    with suppress(OSError):
        keep(library, chosen)
    return chosen


def _measured(library: Path, isa: str, ops: Any) -> Chosen:
    products = products_of(isa)
    search = _Search(library, Forms.of(isa))
    # The first use may be within a trace, whose tensors have no data.
    with _disable_current_modes(), torch.no_grad(), one_thread():
        decode = _decode(ops)
        search.among([{"few_rows": each} for each in products if each != "tiles"], decode)
        asked = product(CACHES, AHEAD_KIB)
        search.among([{"asks": cache, "ahead_kib": kib} for cache, kib in asked], decode)
        weights = [packed_linear.pack(_drawn(_WIDTH, _WIDTH)) for _ in range(_LAYERS)]
        halves = [weight.view(torch.int16) for weight in weights]
        if len(products) > 1:
            search.among([{"many_rows": each} for each in products], _prefill(ops))
            search.among([{"linear": each} for each in products], _layers(ops, weights))
        for asking, rows in _ROWS_OF_ASKING.items():
            asked_weights = [{asking: cache} for cache in ("L1", "L2")]
            both = [_layers(ops, each, [(rows, _LAYERS)]) for each in (weights, halves)]
            search.among(asked_weights, partial(_all, both), _SMALL_GAIN, _MANY_ROUNDS)
        of_halves = [{"linear_halves": each} for each in products_of_halves(isa)]
        if len(of_halves) > 1:  # behind what "tiles" would hide
            search.among(of_halves, _layers(ops, halves))
    return Chosen(search.best, search.ratios)


class _Search:
    """Goes from form to form where that gains.

    Args:
        library: of the kernels.
        best: what it begins with.

    Attributes:
        best: the fastest so far.
        ratios: how many times as fast as the best of their kind before were others.
    """

    def __init__(self, library: Path, best: Forms) -> None:
        self._library = library
        self.best = best
        self.ratios: dict[str, float] = {}

    def among(
        self,
        changes: Sequence[dict[str, Any]],
        call: Callable[[], object],
        least: float = _LEAST_GAIN,
        rounds: int = _ROUNDS,
    ) -> None:
        """The fastest of changes to the best, of which the first is none."""
        options = [replace(self.best, **change) for change in changes]
        if len(options) == 1:
            return
        gains = self._gains(options, call, rounds)
        for change, gain in zip(changes[1:], gains[1:], strict=True):
            named = ", ".join(f"{name} {value}" for name, value in change.items())
            self.ratios[named] = round(gain, 3)
        fastest = options[gains.index(max(gains))]
        if min(max(gains), self._gains((self.best, fastest), call, rounds)[1]) >= least:
            self.best = fastest

    def _gains(
        self, options: Sequence[Forms], call: Callable[[], object], rounds: int
    ) -> list[float]:
        """How many times as fast as the first each is."""
        runs = [partial(self._run, each, call) for each in options]
        first, *others = medians(runs, rounds, time.thread_time)
        return [1.0, *(first / each for each in others)]

    def _run(self, forms: Forms, call: Callable[[], object]) -> None:
        take(self._library, forms)
        call()


def _decode(ops: Any) -> Callable[[], object]:
    """A token of each of some requests, their pages in any order."""
    pages = torch.randperm(_REQUESTS * _PAGES, generator=_chance(), device="cpu").int()
    lengths = torch.full((_REQUESTS,), _PAGES * _PAGE, dtype=torch.int32, device="cpu")
    starts = torch.arange(_REQUESTS + 1, dtype=torch.int32, device="cpu")
    caches = (_drawn(_REQUESTS * _PAGES, _PAGE, _KV_HEADS, _DIM) for _ in range(2))
    query = _drawn(_REQUESTS, _HEADS, _DIM)
    table = pages.view(_REQUESTS, _PAGES)
    return partial(ops.paged_attention, query, *caches, table, lengths, starts, _DIM**-0.5)


def _prefill(ops: Any) -> Callable[[], object]:
    """A prompt of a quarter of the heads."""
    pages = torch.arange(_PROMPT // _PAGE, dtype=torch.int32, device="cpu")[None]
    length = torch.tensor([_PROMPT], dtype=torch.int32, device="cpu")
    starts = torch.tensor([0, _PROMPT], dtype=torch.int32, device="cpu")
    caches = (_drawn(_PROMPT // _PAGE, _PAGE, _KV_HEADS // 4, _DIM) for _ in range(2))
    query = _drawn(_PROMPT, _HEADS // 4, _DIM)
    return partial(ops.paged_attention, query, *caches, pages, length, starts, _DIM**-0.5)


def _layers(
    ops: Any, weights: list[Tensor], rows_of: Sequence[tuple[int, int]] = _ROWS_OF_LAYERS
) -> Callable[[], object]:
    """Rows of a decode, of some more, and of a prompt; of halves in float32."""
    dtype = torch.float32 if weights[0].dtype is torch.int16 else weights[0].dtype
    inputs = [  # a third, so that all bits of float32 are in use
        (_drawn(rows, _WIDTH).to(dtype) / 3, weights[:layers]) for rows, layers in rows_of
    ]

    def call() -> None:
        for input, some in inputs:
            for weight in some:
                ops.packed_linear(input, weight)

    return call


def _all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _drawn(*shape: int) -> Tensor:
    """Random bfloat16, as zeros would be faster; the same again and again, as that is not."""
    some = torch.randn(1 << 18, generator=_chance(), dtype=torch.float32, device="cpu").bfloat16()
    count = math.prod(shape)
    return some.repeat(-(-count // len(some)))[:count].view(shape)


def _chance() -> torch.Generator:
    return torch.Generator("cpu").manual_seed(0)  # not the user's
