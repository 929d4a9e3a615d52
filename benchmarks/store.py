"""Prints the time of a second start from a store: `python benchmarks/store.py [--only WHAT]`.

Each start is a process of its own, with an empty store or the one that the first start filled. Only
`warmup()` is timed, without imports and the model. `run` captures the graphs of `compiled-attn run`
with default options, `buckets` one layer of attention in 64 buckets. `puts` stores small artifacts
alternately in a store of few entries and in one of many.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compiled_attn import PagedKVCache, StepBatch, UnifiedAttention
from compiled_attn.cli.store import stored_backend
from graphs import Bucket, BucketSpace, WarmupManager, WarmupReport, explicit
from graphs.capture.contract import Backend
from graphs.store import ArtifactStore

_RUN_SHARE = 0.05
_BUCKETS_SECONDS = 2.0
_FEW, _MANY, _PUTS = 10, 1000, 100
_PUT_RATIO = 1.5
_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 8, 2, 64, 16


class Attention(nn.Module):
    """One layer of attention that computes its own metadata."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = UnifiedAttention(PagedKVCache(1, 1024, _BLOCK_SIZE, _KV_HEADS, _HEAD_DIM))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *step: Tensor | None) -> Tensor:
        """``[T, H, D]``, ``[T, Hk, D]`` twice, and a `StepBatch`, to ``[T, H, D]``."""
        metadata = StepBatch(*step).metadata(_BLOCK_SIZE)  # type: ignore[arg-type]
        result: Tensor = self.attention(query, key, value, metadata)
        return result


def inputs_of(bucket: Bucket) -> list[Tensor | None]:
    """Queries, keys and values of a padding step."""
    step = StepBatch.padding({**bucket, "shared": 0, "logits": bucket.tokens})
    heads = (_HEADS, _KV_HEADS, _KV_HEADS)
    return [*(torch.zeros(bucket.tokens, count, _HEAD_DIM) for count in heads), *step]


def space_of(count: int) -> BucketSpace:
    """The largest `count` of 64 buckets of tokens and blocks."""
    sizes = [(8 * t, 32 * u) for t in range(1, 9) for u in range(1, 9)]
    return explicit(["tokens", "unique"], sizes[-count:])


def warm_up_run(backend: str | Backend) -> WarmupReport:
    """The graphs of `compiled-attn run`."""
    from compiled_attn.engine import Engine, EngineConfig
    from compiled_attn.models import default_model

    return Engine(default_model(), EngineConfig(backend=backend)).warmup()


def warm_up_buckets(backend: str | Backend, count: int) -> WarmupReport:
    """The graphs of one layer of attention."""
    manager = WarmupManager(Attention(), space_of(count), inputs_of, backend=backend, timed_runs=0)
    return manager.warmup()


def measure(what: str, store: Path, count: int) -> dict[str, Any]:
    """One start in this process."""
    with stored_backend("inductor", store) as backend:
        report = warm_up_run(backend) if what == "run" else warm_up_buckets(backend, count)
    if len(report.captured) != len(report.results):
        raise RuntimeError(str(report))
    return {
        "seconds": report.elapsed_seconds,
        "graphs": len(report.captured),
        "loaded": len(report.loaded),
        "compiles": report.compiles,
    }


def start(what: str, store: Path, count: int) -> dict[str, Any]:
    """One start in a new process."""
    command = [sys.executable, __file__, "--measure", what, str(store), "--buckets", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(what: str, count: int, repeat: int) -> None:
    """Print a cold start, warm starts, and the goal."""
    with tempfile.TemporaryDirectory(prefix="benchmark-store-") as folder:
        store = Path(folder, "store")
        cold = start(what, store, count)
        warm = [start(what, store, count) for _ in range(repeat)]
    seconds = statistics.median(each["seconds"] for each in warm)
    share = seconds / cold["seconds"]
    print(
        f"{what}: {cold['graphs']} graphs, empty store {cold['seconds']:.1f} s with "
        f"{cold['compiles']} compiles; from the store {seconds:.2f} s (median of {repeat}) with "
        f"{warm[-1]['compiles']}, {warm[-1]['loaded']} graphs loaded: {share:.1%}"
    )
    if what == "run":
        state = "reached" if share <= _RUN_SHARE else "missed"
        print(f"goal: at most {_RUN_SHARE:.0%}: {state}")
    else:
        state = "reached" if seconds < _BUCKETS_SECONDS else "missed"
        print(f"goal: {count} buckets in under {_BUCKETS_SECONDS:g} s: {state}")


def compare_puts() -> None:
    """Print how long a `put` takes with few and with many entries."""
    with tempfile.TemporaryDirectory(prefix="benchmark-store-") as folder:
        artifact = Path(folder, "artifact")
        artifact.write_bytes(b"kernel" * 1000)
        stores = {count: ArtifactStore(Path(folder, f"{count}")) for count in (_FEW, _MANY)}
        for count, store in stores.items():
            for number in range(count):
                store.put({"number": number}, artifact)
        times: dict[int, list[float]] = {count: [] for count in stores}
        for number in range(_PUTS):
            for count, store in stores.items():
                started = time.perf_counter()
                store.put({"more": number}, artifact)
                times[count].append(time.perf_counter() - started)
    few, many = (1e3 * statistics.median(times[count]) for count in (_FEW, _MANY))
    mean = statistics.mean(times[_MANY]) / statistics.mean(times[_FEW])
    print(
        f"puts: {few:.2f} ms with {_FEW} to {_FEW + _PUTS} entries, {many:.2f} ms with {_MANY} to "
        f"{_MANY + _PUTS}, medians: {many / few:.2f} times; means {mean:.2f} times"
    )
    state = "reached" if many <= _PUT_RATIO * few else "missed"
    print(f"goal: constant in the number of entries (within {_PUT_RATIO:g} times): {state}")


def main() -> None:
    """Print all comparisons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["puts", "run", "buckets"])
    parser.add_argument("--buckets", type=int, default=64, metavar="N", help="at most 64")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        what, store = given.measure
        print(json.dumps(measure(what, Path(store), given.buckets)))
        return
    load = os.getloadavg()[0]
    print(f"float32, {torch.get_num_threads()} threads, torch {torch.__version__}, load {load:.1f}")
    if given.only in (None, "puts"):
        compare_puts()
    for what in ("buckets", "run"):
        if given.only in (None, what):
            compare(what, given.buckets, given.repeat)


if __name__ == "__main__":
    main()
