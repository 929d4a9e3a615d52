"""Compares captured graphs with eager runs, at the end of a warmup."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from graphs.bucketed.independence import check_equal
from graphs.bucketed.variant import Variant
from graphs.buckets.space import Bucket
from graphs.errors import BucketedError, CaptureError
from graphs.warmup.manager import WarmupManager

__all__ = ["compare_with_eager"]


def compare_with_eager(variant: Variant, manager: WarmupManager, check: bool) -> None:
    """Run real-sized inputs through their bucket, and compare with an eager run.

    The largest bucket runs too, as outputs may follow an axis up to some size only.

    Args:
        variant, manager: of the callable.
        check: whether padding has to leave results as they are.

    Raises:
        BucketedError: an output does not follow its axis in the largest bucket.
        CaptureError: results differ.
    """
    captured = [result.bucket for result in manager.report.captured] if manager.report else []
    if not captured:
        return
    restore = variant.keep_state()
    largest = max(captured, key=lambda bucket: (manager.buckets.cost(bucket), bucket.sizes))
    with torch.no_grad():
        _run_in(variant, manager, largest, dict(largest))
        for sizes in variant.sizes_to_compare():
            held = [
                bucket
                for bucket in captured
                if all(bucket[axis] >= sizes[axis] for axis in sizes)
                and all(bucket[axis] == sizes[axis] for axis in (variant.exact if check else sizes))
            ]
            if not held:
                continue
            try:
                restore()
                expected = variant.run_eagerly(variant.inputs_at(sizes))
            except Exception:
                continue  # such as a convolution that cannot have this size
            expected = tuple(
                each.clone() if isinstance(each, Tensor) else each for each in expected
            )
            restore()
            bucket = min(held, key=manager.buckets.cost)
            got = _run_in(variant, manager, bucket, sizes)
            got = variant.comparable(got, expected)
            try:
                check_equal(variant.output_names, got, expected, lambda: "the graph is wrong")
            except BucketedError as error:
                raise CaptureError(manager.name, f"{Bucket(**sizes)}: {error}") from None
            break
    restore()


def _run_in(
    variant: Variant, manager: WarmupManager, bucket: Bucket, sizes: Mapping[str, int]
) -> Any:
    leaves, plans = variant.inputs_at(sizes), variant.plans
    plan = plans.add(leaves, sizes, bucket, manager.graph(bucket), plans.generation)
    return plan.run(leaves)
