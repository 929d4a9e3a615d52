"""An engine in a thread of its own: every token arrives, and no reader waits forever."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from compiled_attn import AsyncEngine
from compiled_attn.engine import ConfigError, Engine, EngineConfig, SamplingParams
from compiled_attn.errors import EngineStopped, QueueFull, RequestCancelled
from compiled_attn.testing import CorruptCache
from tests.compiled_attn.engine.counting import LONG, SECONDS, used, warm_engine
from tests.compiled_attn.tiny import tiny_model


def test_a_thousand_requests_of_fifty_threads_get_the_tokens_of_the_same_engine_without_threads():
    config = EngineConfig(
        256, 64, block_size=8, num_blocks=600, context=64, backend="eager", max_graphs=4
    )
    rng = random.Random(0)
    prompts = [[rng.randrange(1, 120) for _ in range(rng.randrange(1, 12))] for _ in range(1000)]
    sampling = [SamplingParams(max_new_tokens=1 + n % 5) for n in range(1000)]
    plain = Engine(tiny_model(), config)
    plain.warmup()
    expected = [result.tokens for result in plain.generate(prompts, sampling, in_order=True)]
    found: dict[int, list[int]] = {}

    def user(number: int) -> None:
        mine = range(number, 1000, 50)
        handles = [(n, serving.submit(prompts[n], sampling[n])) for n in mine]
        for n, handle in handles:
            if n % 2:
                found[n] = [event.token for event in handle]
                assert handle.result().tokens == found[n]
            else:
                found[n] = handle.result(SECONDS).tokens

    with AsyncEngine(Engine(tiny_model(), config)) as serving, ThreadPoolExecutor(50) as pool:
        list(pool.map(user, range(50)))
    assert [found[n] for n in range(1000)] == expected
    assert serving.engine.report().requests == 1000 and used(serving.engine) == 0


def test_a_corrupt_cache_reaches_every_request_and_those_to_come(monkeypatch):
    config = EngineConfig(
        32, 2, block_size=4, num_blocks=20, context=40, backend="eager", sanitize=True
    )
    engine = Engine(tiny_model(), config)
    step = engine.step

    def corrupting():
        events = step()
        table = engine.pool.table(0)
        table.blocks[0] = table.array[0] = 19  # which is free
        return events

    monkeypatch.setattr(engine, "step", corrupting)
    with AsyncEngine(engine) as serving:
        handles = [serving.submit([n, 2, 3, 4, 5], LONG) for n in range(1, 5)]  # of which two wait
        for read in (*(each.result for each in handles), lambda _: serving.submit([7], LONG)):
            with pytest.raises(EngineStopped, match=r"failed .*use_after_free in step") as caught:
                read(SECONDS)
            cause = caught.value.__cause__
            assert isinstance(cause, CorruptCache) and (cause.request, cause.block) == (0, 19)
        assert not serving.is_serving and serving.stop(timeout=SECONDS)


def test_coroutines_read_tokens_as_they_come_and_results():
    async def read(serving, start):
        return [event.token async for event in serving.submit([start], LONG)]

    async def main():
        async with AsyncEngine(warm_engine()) as serving:
            readers = [read(serving, start) for start in range(1, 40)]
            awaited = [serving.submit([start], LONG) for start in range(40, 60)]
            tokens = await asyncio.gather(*readers)
            results = await asyncio.gather(*awaited)
        assert tokens == [[*range(start + 1, start + 31)] for start in range(1, 40)]
        assert [result.tokens[0] for result in results] == [*range(41, 61)]
        assert not serving.is_serving

    asyncio.run(main())


def test_the_first_token_is_read_before_the_second_is_computed(paced):
    executor, serving = paced
    handle = serving.submit([7], LONG)
    executor.steps.release()
    assert next(iter(handle)).token == 8


@pytest.mark.parametrize("way", ["cancel", "break", "close", "interrupt"])
def test_who_stops_reading_frees_the_blocks(way, paced):
    executor, serving = paced
    handle, other = serving.submit([7], LONG), serving.submit([50], LONG)
    executor.steps.release(2)
    tokens = iter(handle)
    assert next(tokens).token == 8
    if way == "cancel":
        handle.cancel()
    elif way == "close":
        tokens.close()
    elif way == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            tokens.throw(KeyboardInterrupt)
    del tokens  # as after a break
    gc.collect()
    executor.steps.release(2)
    with pytest.raises(RequestCancelled, match="a cancelled one: submit it again"):
        handle.result(SECONDS)
    executor.steps.release(100)
    assert other.result(SECONDS).tokens == [*range(51, 81)]
    assert serving.stop() and used(serving.engine) == 0
    assert serving.engine.report().requests == 1


@pytest.mark.parametrize("way", ["break", "cancelled reader", "cancelled result"])
def test_a_coroutine_that_ends_early_frees_the_blocks(way, paced):
    executor, serving = paced

    async def first_of(handle):
        async for event in handle:
            return event.token

    async def all_of(handle):
        return [event async for event in handle]

    async def main():
        handle = serving.submit([7], LONG)
        executor.steps.release()
        if way == "break":
            assert await first_of(handle) == 8
        else:
            reads = all_of(handle) if way == "cancelled reader" else asyncio.wait_for(handle, 99)
            task = asyncio.ensure_future(reads)
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        # The loop closes what a break has left; the engine may be between two steps, and drop it.
        while not (serving._owner._cancelled or handle.has_finished):
            await asyncio.sleep(0.001)
        executor.steps.release(2)
        with pytest.raises(RequestCancelled):
            await handle

    asyncio.run(main())
    assert serving.stop() and used(serving.engine) == 0


def test_a_reader_whose_event_loop_is_gone_is_cancelled(paced):
    executor, serving = paced
    handle = serving.submit([7], LONG)
    loop = asyncio.new_event_loop()
    task = loop.create_task(handle._arrived(handle._readers, handle._has_news))
    loop.run_until_complete(asyncio.sleep(0.01))
    task._log_destroy_pending = False
    loop.close()
    executor.steps.release(4)
    with pytest.raises(RequestCancelled):
        handle.result(SECONDS)


def test_a_request_that_waits_outside_can_be_cancelled_too(paced):
    executor, serving = paced
    first = serving.submit([1], LONG)
    assert executor.begun.wait(SECONDS)
    second = serving.submit([2], LONG)  # while the first step runs
    second.cancel()
    executor.steps.release(40)
    with pytest.raises(RequestCancelled):
        second.result(SECONDS)
    assert len(first.result(SECONDS).tokens) == 30
    first.cancel()  # a finished one stays as it is
    assert len(first.result().tokens) == 30


def test_what_is_too_much_is_refused_with_the_limits_and_later_served(paced):
    executor, serving = paced
    handles = [serving.submit([n], LONG) for n in range(1, 7)]  # max_seqs 4, max_waiting 2
    with pytest.raises(QueueFull, match=r"at most 2 requests .*max_waiting.* 4 run .*max_seqs"):
        serving.submit([9], LONG)
    executor.steps.release(1000)
    assert [handle.result(SECONDS).tokens[0] for handle in handles] == [2, 3, 4, 5, 6, 7]
    assert serving.submit([9], LONG).result(SECONDS).tokens[0] == 10


@pytest.mark.parametrize("bad", [[], [10**9], "text", [1] * 99])
def test_a_request_that_can_never_be_served_is_refused_where_it_is_submitted(bad):
    with AsyncEngine(warm_engine()) as serving:
        with pytest.raises(ConfigError):
            serving.submit(bad, LONG)
        assert serving.submit([3], LONG).result(SECONDS).tokens[0] == 4
    with pytest.raises(ConfigError, match="max_waiting"):
        AsyncEngine(warm_engine(), max_waiting=-1)


def test_continuations_are_taken_as_a_whole_and_begin_behind_the_first(paced):
    executor, serving = paced
    several = SamplingParams(max_new_tokens=3, temperature=1.0, seed=7, n=4)
    with pytest.raises(QueueFull, match="got 7 more that belong together"):
        serving.submit_together([([1], replace(several, n=7))])  # max_seqs 4, max_waiting 2
    handles = serving.submit_together([([1, 2, 3, 4, 5], several)])
    assert [each.sampling.seed for each in handles] == [7, 8, 9, 10]
    with pytest.raises(QueueFull):
        serving.submit_together([([1], replace(several, n=3))])
    others = serving.submit_together([([50], replace(several, n=2))])
    assert executor.begun.wait(SECONDS)  # the first step, which the test lets go now
    assert [each.request_id for each in [*handles[1:], others[1]]] == [None] * 4
    executor.steps.release(1000)
    assert [each.result(SECONDS).tokens for each in handles] == [[6, 7, 8]] * 4
    assert [each.result(SECONDS).tokens for each in others] == [[51, 52, 53]] * 2
    with pytest.raises(ConfigError, match="integers"):
        serving.submit_together([("text", several)])


def test_several_prompts_are_taken_together_or_not_at_all(paced):
    executor, serving = paced
    two = SamplingParams(max_new_tokens=3, temperature=1.0, seed=7, n=2)
    assert serving.most_requests == 6  # max_seqs 4, max_waiting 2
    with pytest.raises(QueueFull, match="got 8 more that belong together"):
        serving.submit_together([([token], two) for token in (1, 2, 3, 4)])
    with pytest.raises(ConfigError, match="token ids"):
        serving.submit_together([([1], two), ([2], two), ([999_999], two)])
    for bad in ([([1], None)], [[1, 2, 3]], [5], 5, "text"):
        with pytest.raises(ConfigError, match=r"expected a list of pairs.*pass \[\(prompt, Sampl"):
            serving.submit_together(bad)
    assert serving.submit_together([]) == []
    requests = [([10], two), ([20], replace(two, max_new_tokens=2)), ([30], two)]
    handles = serving.submit_together(requests)
    assert [each.sampling.seed for each in handles] == [7, 8] * 3
    executor.steps.release(1000)
    expected = [[11, 12, 13], [21, 22], [31, 32, 33]]
    assert [each.result(SECONDS).tokens for each in handles] == [
        w for w in expected for _ in (0, 1)
    ]


def test_a_continuation_whose_first_is_cancelled_goes_on(paced):
    executor, serving = paced
    first, second, third = serving.submit_together([([1, 2, 3, 4, 5], replace(LONG, seed=1, n=3))])
    third.cancel()
    first.cancel()
    executor.steps.release(1000)
    assert len(second.result(SECONDS).tokens) == 30
    for each in (first, third):
        with pytest.raises(RequestCancelled):
            each.result(SECONDS)


@pytest.mark.parametrize("drain", [True, False])
def test_continuations_that_wait_for_the_first_end_with_the_engine(paced, drain):
    executor, serving = paced
    handles = serving.submit_together([([1, 2, 3, 4, 5], replace(LONG, seed=1, n=3))])
    stopping = threading.Thread(target=serving.stop, kwargs={"drain": drain})
    stopping.start()
    executor.steps.release(1000)
    stopping.join()
    if drain:
        assert all(len(each.result().tokens) == 30 for each in handles)
    else:
        assert all(each.has_finished for each in handles)
