"""Measures which linear layers are faster packed, or by oneDNN, once per machine.

The instruction set does not decide it: packed weights are 1.5 times as fast with AMX on Intel, but
slower there with AVX-512 dot products, which run at half of AMD's rate. oneDNN's float32 is up to
twice as fast as MKL's on AMD, and slower on Intel. Processes measure one after the other, so that
all decide alike.
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

from compiled_attn.ops.cpu.libraries import layer_tuning_file
from compiled_attn.ops.packed_linear import Packing, fits_bf16, pack, pack_bf16
from compiled_attn.ops.paged_attention import NativeOps, load
from compiled_attn.ops.timing import medians
from graphs.errors import StoreBusy
from graphs.files import write_whole
from graphs.store.lock import locked

__all__ = ["FLOAT32", "ONEDNN", "WIDENED", "Tuning", "onednn_sizes", "tuning"]

FLOAT32 = ", float32"
"""Suffix of results for packed float32 weights."""
WIDENED = ", float32 as bf16"
"""Suffix of results for float32 weights packed as bf16-widen."""
ONEDNN = ", oneDNN"
"""Suffix of results for oneDNN."""

Measure = Callable[[NativeOps, Tensor], float]

_ROWS = (1, 16, 256)
_FEW_ROWS = (1, 16)
_LARGE = 1 << 23  # elements: an output head, used with few rows only
_PANEL = 16  # outputs that are packed together
_COLD_BYTES = 1 << 25  # of weights used in turn, more than caches hold
_MANY_ROWS = (32, 256)  # fewer always use MKL
_MANY_BYTES = 1 << 23  # of weights multiplied with many rows
_ROUNDS = 3
_LOCK_SECONDS = 10.0


class Tuning:
    """Speed of packed layers, and of oneDNN in float32, relative to torch's own, by layer size.

    Args:
        ops: the kernels to measure.
        file: where results are saved; None: nowhere.
        measure: returns the ratio for ``weight [N, K]``; None: measures the ops.

    Attributes:
        file: as given; None after a failed write.
    """

    def __init__(self, ops: NativeOps, file: Path | None, measure: Measure | None = None) -> None:
        self._ops, self.file = ops, file
        self._measure = measure
        self._known: dict[str, float] = _read(file)
        self._measured: dict[str, float] = {}
        self._forgotten: dict[str, float] = {}

    @property
    def results(self) -> Mapping[str, float]:
        """All known ratios, by ``threads, outputs x inputs`` and a suffix like `FLOAT32`."""
        return self._known

    def packing(self, weight: Tensor) -> Packing | None:
        """Returns the fastest packing of ``weight [N, K]``, which can be packed; None: unpacked."""
        is_float32 = weight.dtype is torch.float32
        packed = self._gain(weight, FLOAT32 if is_float32 else "", partial(_packed_ratio, pack))
        widened = (
            self._gain(weight, WIDENED, partial(_packed_ratio, pack_bf16))
            if fits_bf16(weight)
            else 0.0
        )
        if max(packed, widened) <= 1:
            return None
        return "bf16-widen" if widened > packed else "packed"

    def takes_onednn(self, weight: Tensor) -> bool:
        """Whether oneDNN is faster than MKL for ``weight [N, K]`` float32."""
        return self._gain(weight, ONEDNN, _onednn_ratio) > 1

    def _gain(self, weight: Tensor, kind: str, measure: Measure) -> float:
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
        """Forgets all results, so that they are measured again."""
        self._forgotten, self._known, self._measured = self._known, {}, {}

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Locks the file for other processes, if the folder is writable."""
        with ExitStack() as lock:
            if self.file is not None:
                try:
                    path = self.file.with_suffix(".lock")
                    lock.enter_context(locked(path, shared=False, seconds=_LOCK_SECONDS))
                except (OSError, StoreBusy):
                    self.file = None
            yield

    def _read_again(self) -> None:
        if self.file is not None:
            saved = _read(self.file).items() - self._forgotten.items()
            self._known = dict(sorted(saved)) | self._measured

    def _write(self) -> None:
        if self.file is None:
            return
        try:
            write_whole(self.file, json.dumps(self._known, indent=1).encode())
        except OSError:
            self.file = None  # read-only folders must work too


def tuning() -> Tuning:
    """Returns the tuning of this process's kernels.

    Raises:
        NativeUnavailable: there are no native kernels.
    """
    ops = load(strict=True)
    assert ops.build is not None
    return Tuning(ops, layer_tuning_file(ops.build.library))


def onednn_sizes(model: nn.Module, tuned: Tuning) -> set[tuple[int, int]]:
    """Returns (outputs, inputs) of a model's float32 linear layers that are faster by oneDNN."""
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
    """Time of MKL over time of oneDNN, geometric mean over numbers of rows."""
    outputs, inputs = weight.shape
    outputs = min(outputs, max(1, _LARGE // inputs))  # part of a large output head
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
    """Time of plain over packed weights, geometric mean over numbers of rows; plain float32 by the
    faster of MKL and oneDNN."""
    outputs, inputs = weight.shape
    outputs = min(outputs, max(1, _LARGE // inputs // _PANEL) * _PANEL)  # part of a large head
    copies = max(1, min(64, _COLD_BYTES // (outputs * inputs * weight.element_size())))
    chance = torch.Generator().manual_seed(0)  # not the user's
    random = torch.randn(outputs, inputs, generator=chance)  # zeros would be faster
    random = random.bfloat16().to(weight.dtype)  # so that it can be packed as bfloat16
    plain = [random.clone() for _ in range(copies)]
    packed = [pack(random) for _ in range(copies)]
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
                torch.randn(n, inputs, dtype=weight.dtype, generator=chance) for n in counts
            )
        ]
    return math.exp(statistics.fmean(map(math.log, ratios)))


def _all(linear: Callable[[Tensor, Tensor], Tensor], input: Tensor, weights: list[Tensor]) -> None:
    for weight in weights:
        linear(input, weight)


def _ratio_of(*calls: Callable[[], object]) -> float:
    """Median time of the fastest of the others over that of the last."""
    *others, last = medians(calls, _ROUNDS)
    return min(others) / last
