"""Memory of graphs, predicted from three captures and compared with what all of them take."""

from __future__ import annotations

import mmap
from dataclasses import replace

import numpy as np
import pytest
import torch

from graphs import Bucket, capture, exponential, linear
from graphs.backends.inductor import InductorBackend
from graphs.buckets.graph_memory import GraphMemory, sample
from graphs.capture.contract import Frozen, Job


def grown(space, fixed, per_unit, pool, noise=0.0):
    """Growth of each capture, largest first: the first one also makes the pool."""
    rng = np.random.default_rng(0)
    buckets = sorted(space, key=lambda b: np.prod([*b.sizes]), reverse=True)
    pools = [pool] + [0] * (len(buckets) - 1)
    return {
        bucket: int(
            (fixed + per_unit * np.prod([*bucket.sizes])) * (1 + noise * rng.uniform(-1, 1))
        )
        + own
        for bucket, own in zip(buckets, pools, strict=True)
    }


SPACES = [linear(tokens=(1, 64, 2048)), exponential(rows=(1, 32, 6), length=(16, 512, 6))]


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("pool", [0, 80 << 20])
@pytest.mark.parametrize(("fixed", "per_unit"), [(2 << 20, 4096), (0, 1000), (3 << 20, 0)])
def test_three_captures_predict_all_within_15_percent(space, pool, fixed, per_unit):
    real = grown(space, fixed, per_unit, pool, noise=0.08)
    memory = GraphMemory.fitted((bucket, real[bucket]) for bucket in sample([*space]))
    assert memory.total(space) == pytest.approx(sum(real.values()), rel=0.15)
    assert memory.total([]) == 0


def test_without_noise_the_prediction_is_exact():
    real = grown(SPACES[1], 1 << 20, 333, 50 << 20)
    memory = GraphMemory.fitted((bucket, real[bucket]) for bucket in sample([*SPACES[1]]))
    assert memory.total(SPACES[1]) == pytest.approx(sum(real.values()))
    assert memory.error == pytest.approx(0, abs=1e-6)
    assert memory.shared == pytest.approx(50 << 20)
    small = [bucket for bucket in SPACES[1] if bucket["rows"] <= 16]  # half the pool
    assert memory.total(small) == pytest.approx(sum(map(memory.of, small)) + (25 << 20))


def test_the_error_of_the_fit_is_the_largest_of_the_measurements():
    rows = [({"n": 1}, 100), ({"n": 2}, 100), ({"n": 3}, 200), ({"n": 4}, 400)]
    memory = GraphMemory.fitted(rows)
    errors = [abs(memory.of(bucket) - bytes) / bytes for bucket, bytes in rows[:-1]]
    assert memory.error == pytest.approx(max(errors)) and "error of the fit" in str(memory)
    coefficients = np.polyfit([1, 2, 3], [100, 100, 200], 1, w=1 / np.array([100, 100, 200]))
    assert [memory.per_unit, memory.fixed] == pytest.approx([*coefficients]) or memory.fixed == 0


def test_sizes_may_be_another_function_of_a_bucket():
    rows = [({"tokens": n, "requests": 32}, 1000 + 7 * n) for n in (64, 128, 512)]
    memory = GraphMemory.fitted(rows, size=lambda bucket: bucket["tokens"])
    assert memory.of({"tokens": 256, "requests": 1}) == pytest.approx(1000 + 7 * 256)


@pytest.mark.parametrize(
    "rows",
    [
        [({"n": 1}, 5), ({"n": 9}, 9)],
        [({"n": 1}, 5), ({"n": 1}, 6), ({"n": 9}, 9)],
        [({"n": 1}, -5), ({"n": 5}, 6), ({"n": 9}, 9)],
    ],
)
def test_too_few_or_impossible_measurements_are_refused(rows):
    with pytest.raises(ValueError, match=r"captures of 3 sizes, got .*: capture the smallest"):
        GraphMemory.fitted(rows)
    with pytest.raises(ValueError, match="got 0 bytes: measure again"):
        GraphMemory.fitted([({"n": n}, 0) for n in (1, 2, 3)])


def test_the_sample_is_the_largest_the_smallest_and_what_lies_between():
    space = linear(tokens=(1, 64, 512))
    assert [b["tokens"] for b in sample([*space])] == [512, 256, 1]
    assert [b["tokens"] for b in sample([*space], 5)] == [512, 384, 256, 128, 1]
    with pytest.raises(ValueError, match="expected 3 to 2 captures of 2 buckets, got 3"):
        sample([Bucket(n=1), Bucket(n=2)])


class Holding(InductorBackend):
    """Graphs that hold mapped pages, as a device's graphs hold their pool.

    Sixteen times the input, so that what the allocator keeps of temporaries is little beside it.
    """

    def capture(self, job: Job) -> Frozen:
        frozen = super().capture(job)
        size = sum(value.nbytes for value in job.examples)
        pages = mmap.mmap(-1, 16 * size)
        for _ in range(16):
            pages.write(b"1" * size)
        return replace(frozen, keep_alive=(frozen.keep_alive, pages))


def test_real_captures_are_predicted_from_three_within_15_percent():
    def double(x):
        return (x * 2 + 1,)

    space = linear(rows=(4, 4, 32))
    backend, graphs, real = Holding(name="holding", compiler="aot_eager"), [], {}
    largest_first = sorted(space, key=lambda bucket: -bucket["rows"])
    for bucket in [Bucket(rows=2), *largest_first]:  # the first one loads the compiler
        inputs = (torch.ones(bucket["rows"], 1 << 14),)
        graphs.append(capture(double, inputs, backend=backend, name="double"))
        real[bucket] = graphs[-1].bytes
    memory = GraphMemory.fitted((bucket, real[bucket]) for bucket in sample([*space]))
    measured = sum(real[bucket] for bucket in space)
    assert memory.total(space) == pytest.approx(measured, rel=0.15)
