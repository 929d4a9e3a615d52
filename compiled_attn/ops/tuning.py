"""Choices that were measured on this machine, once, and are kept beside the kernel library.

The instruction set alone does not decide it: packed weights win by half on an Intel with AMX, and
lose there by the dot products of AVX-512, which have half the rate that they have on an AMD.
oneDNN's float32 is up to twice as fast as MKL's on that AMD, and slower on that Intel. Processes
measure one after the other, so that all choose alike.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from compiled_attn.ops.cpu.libraries import tuning_of
from compiled_attn.ops.packed_linear import Packing, halve, has_halves, pack
from compiled_attn.ops.paged_attention import NativeOps, load
from compiled_attn.ops.timing import medians
from graphs.errors import StoreBusy
from graphs.files import write_whole
from graphs.store.lock import locked

__all__ = ["FLOAT32", "HALVES", "ONEDNN", "Tuning", "onednn_sizes", "tuning"]

FLOAT32 = ", float32"
"""End of the name of a result of packed weights of that dtype."""
HALVES = ", float32 in halves"
"""End of the name of a result of packed weights that are the upper halves of that dtype."""
ONEDNN = ", oneDNN"
"""End of the name of a result of oneDNN."""

Measure = Callable[[NativeOps, Tensor], float]

_ROWS = (1, 16, 256)
_FEW_ROWS = (1, 16)
_LARGE = 1 << 23  # elements: a head, of which few rows are ever wanted
_COLD_BYTES = 1 << 25  # of weights that are read in turn, so that no cache holds them all
_MANY_ROWS = (32, 256)  # fewer stay with MKL
_MANY_BYTES = 1 << 23  # of weights that are multiplied with as many
_ROUNDS = 3
_PATIENCE_SECONDS = 10.0


class Tuning:
    """How many times as fast as torch's own linear layers others are, by the sizes of a layer.

    The others have packed weights, or in float32 they are oneDNN's in place of MKL's.

    Args:
        ops: the kernels that are measured.
        file: where results are kept; None: nowhere.
        measure: gives the ratio of ``weight [N, K]``.

    Attributes:
        file: as given; None once it could not be written.
    """

    def __init__(
        self,
        ops: NativeOps,
        file: Path | None,
        measure: Measure | None = None,
    ) -> None:
        self._ops, self.file = ops, file
        self._measure = measure
        self._known: dict[str, float] = _read(file)
        self._measured: dict[str, float] = {}
        self._forgotten: dict[str, float] = {}

    @property
    def results(self) -> Mapping[str, float]:
        """Every ratio that is known, by ``threads, outputs x inputs`` and an end as `FLOAT32`."""
        return self._known

    def packing(self, weight: Tensor) -> Packing | None:
        """How ``weight [N, K]``, which can be packed, is read fastest; None: as it is."""
        is_float32 = weight.dtype is torch.float32
        packed = self._gain(weight, FLOAT32 if is_float32 else "", partial(_packed_ratio, pack))
        halves = (
            self._gain(weight, HALVES, partial(_packed_ratio, halve)) if has_halves(weight) else 0.0
        )
        if max(packed, halves) <= 1:
            return None
        return "halves" if halves > packed else "packed"

    def takes_onednn(self, weight: Tensor) -> bool:
        """Whether oneDNN computes the layer of ``weight [N, K]`` float32 faster than MKL."""
        return self._gain(weight, ONEDNN, _onednn_ratio) > 1

    def _gain(self, weight: Tensor, kind: str, measure: Measure) -> float:
        """The ratio of the sizes of a weight, measured if it is not known."""
        outputs, inputs = weight.shape
        key = f"{torch.get_num_threads()} threads, {outputs} x {inputs}{kind}"
        if key not in self._known:
            with self._alone():
                self._read_again()
                if key not in self._known:
                    ratio = (self._measure or measure)(self._ops, weight)
                    self._known[key] = self._measured[key] = round(ratio, 3)
                    self._write()
        return self._known[key]

    def forget(self) -> None:
        """Measures everything again when it is next asked for."""
        self._forgotten, self._known, self._measured = self._known, {}, {}

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Other processes wait; if the folder cannot be written, they are not asked to."""
        with ExitStack() as lock:
            if self.file is not None:
                try:
                    path = self.file.with_suffix(".lock")
                    lock.enter_context(locked(path, shared=False, seconds=_PATIENCE_SECONDS))
                except (OSError, StoreBusy):
                    self.file = None
            yield

    def _read_again(self) -> None:
        """What other processes have written meanwhile, and what was measured here."""
        if self.file is not None:
            kept = _read(self.file).items() - self._forgotten.items()
            self._known = dict(sorted(kept)) | self._measured

    def _write(self) -> None:
        if self.file is None:
            return
        try:
            write_whole(self.file, json.dumps(self._known, indent=1).encode())
        except OSError:
            self.file = None  # a folder that is only read serves too


def tuning() -> Tuning:
    """Of the kernels of this process.

    Raises:
        NativeUnavailable: there are none.
    """
    ops = load(strict=True)
    assert ops.build is not None
    return Tuning(ops, tuning_of(ops.build.library))


def onednn_sizes(model: nn.Module, tuned: Tuning) -> set[tuple[int, int]]:
    """(outputs, inputs) of the float32 linear layers of a model that are faster by oneDNN."""
    weights = {
        (m.out_features, m.in_features): m.weight
        for m in model.modules()
        if isinstance(m, nn.Linear) and m.weight.dtype is torch.float32
    }
    return {sizes for sizes, weight in weights.items() if tuned.takes_onednn(weight)}


def _read(file: Path | None) -> dict[str, float]:
    try:
        known = json.loads(file.read_text()) if file else {}
        return {str(key): float(ratio) for key, ratio in known.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _onednn_ratio(_: NativeOps, weight: Tensor) -> float:
    """The geometric mean over numbers of rows of the time of MKL over that of oneDNN."""
    outputs, inputs = weight.shape
    outputs = min(outputs, max(1, _LARGE // inputs))  # of a head some do
    count = max(1, min(64, _MANY_BYTES // (4 * outputs * inputs)))
    chance = torch.Generator().manual_seed(0)
    weights = [torch.randn(outputs, inputs, generator=chance) for _ in range(count)]
    with torch.no_grad():
        ratios = [
            _ratio_of(
                partial(_all, functional.linear, input, weights),
                partial(_all, _by_onednn, input, weights),
            )
            for input in (torch.randn(n, inputs, generator=chance) for n in _MANY_ROWS)
        ]
    return math.exp(statistics.fmean(map(math.log, ratios)))


def _by_onednn(input: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, None, "none", [], "")
    return out


def _packed_ratio(pack: Callable[[Tensor], Tensor], ops: NativeOps, weight: Tensor) -> float:
    """The geometric mean over numbers of rows of the time of plain weights over that of packed.

    In float32 that of the faster library of the two.
    """
    copies = max(1, min(64, _COLD_BYTES // (weight.numel() * weight.element_size())))
    chance = torch.Generator().manual_seed(0)  # not the user's
    drawn = torch.randn(weight.shape, generator=chance)  # zeros would be faster
    drawn = drawn.bfloat16().to(weight.dtype)  # of which there are halves
    plain = [drawn.clone() for _ in range(copies)]
    packed = [pack(drawn) for _ in range(copies)]
    counts = _FEW_ROWS if weight.numel() > _LARGE else _ROWS
    plainly: list[Callable[[Tensor, Tensor], Tensor]] = [functional.linear]
    if weight.dtype is torch.float32 and torch.backends.mkldnn.is_available():
        plainly.append(_by_onednn)
    with torch.no_grad():
        ratios = [
            _ratio_of(
                *(partial(_all, linear, input, plain) for linear in plainly),
                partial(_all, ops.packed_linear, input, packed),
            )
            for input in (
                torch.randn(n, weight.shape[1], dtype=weight.dtype, generator=chance)
                for n in counts
            )
        ]
    return math.exp(statistics.fmean(map(math.log, ratios)))


def _all(linear: Callable[[Tensor, Tensor], Tensor], input: Tensor, weights: list[Tensor]) -> None:
    for weight in weights:
        linear(input, weight)


def _ratio_of(*calls: Callable[[], object]) -> float:
    """The median time of the fastest of all but the last over that of the last."""
    *others, last = medians(calls, _ROUNDS)
    return min(others) / last
