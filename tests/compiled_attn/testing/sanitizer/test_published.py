"""Published bugs of other engines, each built again in ours: all of them are found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch

from compiled_attn.cache.blocks.allocator import BlockAllocator
from compiled_attn.cache.blocks.states import BlockStates
from compiled_attn.engine import Engine, SamplingParams
from compiled_attn.testing import CorruptCache
from tests.compiled_attn.engine.small import prompts_of, small_engine
from tests.compiled_attn.testing.sanitizer.faults import (
    changed_batches,
    other_owner,
    stale_batch,
    written_padding,
)


def vllm_37076(engine: Engine) -> AbstractContextManager[Any]:
    """A block is free with the first of several requests that share it, and is given away."""
    release = BlockAllocator.release

    def early(blocks: BlockAllocator, block: int) -> None:
        blocks.refs[block] = 1
        release(blocks, block)

    return mock.patch.object(BlockAllocator, "release", early)


def vllm_39146(engine: Engine) -> AbstractContextManager[Any]:
    """Two requests get one block, of which each believes that it is its own."""

    def lowest(states: BlockStates) -> int:
        return 1

    return mock.patch.object(BlockStates, "take", lowest)


def vllm_40047(engine: Engine) -> AbstractContextManager[Any]:
    """Padded rows, whose values are garbage, reach the cache: here slot 5 of block 1."""

    def garbage(plan: Any, batch: Any) -> Any:
        slots = batch.slot_mapping.clone()
        slots[len(plan.rows.slots) :] = 5
        return batch._replace(slot_mapping=slots)

    return changed_batches(garbage)


BUGS = {
    "vllm#37076": (vllm_37076, {"use_after_free", "wrong_owner", "unwritten_read"}),
    "vllm#39146": (vllm_39146, {"wrong_owner"}),
    "vllm#40047": (vllm_40047, {"padding_write"}),
    "vllm#43810": (written_padding, {"padding_write"}),
    "torchtitan#3709": (stale_batch, {"stale_table"}),
    "LMCache#4385": (other_owner, {"wrong_owner"}),
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    yield small_engine(sanitize=True, num_blocks=24, max_graphs=1)


@pytest.mark.parametrize("bug", BUGS)
def test_published_bugs_are_found(engine: Engine, bug: str) -> None:
    build, kinds = BUGS[bug]
    shared = torch.arange(1, 13).tolist()
    prompts = [shared + prompt[:6] for prompt in prompts_of(5, seed=1)]
    for each in engine.open_requests:
        engine.abort(each)
    for prompt in prompts[:2]:
        engine.submit(prompt, SamplingParams(max_new_tokens=12))
    for _ in range(2):
        engine.step()
    with build(engine), pytest.raises(CorruptCache) as caught:
        engine.submit(prompts[2], SamplingParams(max_new_tokens=4))
        for number in range(40):
            if number % 5 == 0:
                engine.submit([*shared, number], SamplingParams(max_new_tokens=3))
            engine.step()
    assert caught.value.kind in kinds, str(caught.value)
