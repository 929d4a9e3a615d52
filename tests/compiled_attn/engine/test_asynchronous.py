"""An engine in a thread of its own: every token arrives, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from compiled_attn import AsyncEngine
from compiled_attn.engine import ConfigError, Engine, EngineConfig, SamplingParams
from compiled_attn.errors import EngineStopped, QueueFull, RequestCancelled
from tests.compiled_attn.engine.counting import CONFIG, Counting
from tests.compiled_attn.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[3]
LONG = SamplingParams(max_new_tokens=30)
SECONDS = 20.0  # that nothing here takes, but a machine under load may


class Paced(Counting):
    """Takes a step when the test lets it; fails in the step that the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = threading.Semaphore(0)
        self.begun = threading.Event()
        self.error: BaseException | None = None

    def run(self, step):
        self.begun.set()
        assert self.steps.acquire(timeout=SECONDS)
        if self.error is not None:
            raise self.error
        return super().run(step)


def _engine(executor=None) -> Engine:
    engine = Engine(executor or Counting(), CONFIG)
    engine.warmup()
    return engine


def _used(engine: Engine) -> int:
    return engine.sizing.num_blocks - 1 - engine.pool.available


@pytest.fixture
def paced():
    """An engine of which the test lets each step go, and what serves it."""
    executor = Paced()
    serving = AsyncEngine(_engine(executor), max_waiting=2)
    yield executor, serving
    executor.steps.release(1000)
    serving.stop(drain=False, timeout=SECONDS)


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
    assert serving.engine.report().requests == 1000 and _used(serving.engine) == 0


def test_coroutines_read_tokens_as_they_come_and_results():
    async def read(serving, start):
        return [event.token async for event in serving.submit([start], LONG)]

    async def main():
        async with AsyncEngine(_engine()) as serving:
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
    with pytest.raises(RequestCancelled, match="was cancelled: submit it again"):
        handle.result(SECONDS)
    executor.steps.release(100)
    assert other.result(SECONDS).tokens == [*range(51, 81)]
    assert serving.stop() and _used(serving.engine) == 0
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
        executor.steps.release(2)
        if way == "break":
            assert await first_of(handle) == 8
        else:
            reads = all_of(handle) if way == "cancelled reader" else asyncio.wait_for(handle, 99)
            task = asyncio.ensure_future(reads)
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await asyncio.sleep(0)  # the loop closes what a break has left
        executor.steps.release(2)
        with pytest.raises(RequestCancelled):
            await handle

    asyncio.run(main())
    assert serving.stop() and _used(serving.engine) == 0


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
    first.cancel()  # one that has ended stays as it is
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
    with AsyncEngine(_engine()) as serving:
        with pytest.raises(ConfigError):
            serving.submit(bad, LONG)
        assert serving.submit([3], LONG).result(SECONDS).tokens[0] == 4
    with pytest.raises(ConfigError, match="max_waiting"):
        AsyncEngine(_engine(), max_waiting=-1)


def test_an_error_of_one_request_is_its_own(monkeypatch):
    with AsyncEngine(_engine()) as serving:
        submit = serving.engine.submit

        def failing(prompt, *args, **kwargs):
            if prompt == [13]:
                raise ZeroDivisionError("thirteen")
            return submit(prompt, *args, **kwargs)

        monkeypatch.setattr(serving.engine, "submit", failing)
        bad, good = serving.submit([13], LONG), serving.submit([14], LONG)
        with pytest.raises(ZeroDivisionError, match="thirteen"):
            bad.result(SECONDS)
        assert good.result(SECONDS).tokens[0] == 15


def test_a_row_without_a_token_ends_its_request_alone(monkeypatch):
    executor = Counting()
    run = executor.run
    monkeypatch.setattr(
        executor, "run", lambda step: ["not finite" if t == 13 else t for t in run(step)]
    )
    with AsyncEngine(_engine(executor)) as serving:
        bad, good = serving.submit([10], LONG), serving.submit([20], LONG)
        assert [event.token for event in bad] == [11, 12, None]
        assert bad.result().error == "not finite" and len(good.result(SECONDS).tokens) == 30


def test_an_executor_that_raises_reaches_every_request_and_those_to_come(paced):
    executor, serving = paced
    executor.error = ValueError("the device is gone")
    handles = [serving.submit([n], LONG) for n in range(1, 6)]  # of which one waits

    async def read():
        return [event async for event in handles[0]]

    reader = threading.Thread(target=executor.steps.release)
    reader.start()
    with pytest.raises(EngineStopped, match=r"failed \(ValueError: the device is gone\)"):
        asyncio.run(read())
    for handle in handles:
        with pytest.raises(EngineStopped, match="make another AsyncEngine") as caught:
            handle.result(SECONDS)
        assert caught.value.__cause__ is executor.error
    with pytest.raises(EngineStopped, match="the device is gone"):
        serving.submit([9], LONG)
    assert not serving.is_serving and serving.stop(drain=False, timeout=SECONDS)
    executor.error = None
    executor.steps.release(1000)
    with AsyncEngine(serving.engine) as again:  # the engine itself goes on
        assert len(again.submit([3], LONG).result(SECONDS).tokens) == 30
    assert _used(serving.engine) == 0


def test_a_warmup_that_fails_reaches_who_submitted_meanwhile():
    begun, go_on = threading.Event(), threading.Event()

    class Broken(Counting):
        def warmup(self, progress=None):
            begun.set()
            go_on.wait(SECONDS)
            raise RuntimeError("no compiler")

    serving = AsyncEngine(Engine(Broken(), CONFIG))
    assert begun.wait(SECONDS)
    handle = serving.submit([1], LONG)
    go_on.set()
    with pytest.raises(EngineStopped, match="no compiler"):
        handle.result(SECONDS)


def test_an_engine_is_warmed_up_in_its_thread_and_can_be_stopped_meanwhile():
    told, go_on = [], threading.Event()
    config = EngineConfig(16, 4, block_size=4, num_blocks=20, backend="eager", context=40)
    with AsyncEngine(Engine(tiny_model(), config), progress=told.append) as serving:
        assert len(serving.submit([1, 2], LONG).result(SECONDS).tokens) == 30
    assert told and serving.engine.warmup_report is not None

    def wait(event):
        go_on.wait(SECONDS)

    stopped = AsyncEngine(Engine(tiny_model(), config), progress=wait)
    handle = stopped.submit([1], LONG)
    stopper = threading.Thread(target=stopped.stop, kwargs={"drain": False})
    stopper.start()
    while stopped.is_serving:
        time.sleep(0.001)
    go_on.set()
    with pytest.raises(EngineStopped, match="that was stopped"):
        handle.result(SECONDS)
    stopper.join(SECONDS)
    assert stopped.engine.warmup_report is None


def test_a_drain_serves_what_was_submitted_and_refuses_more(paced):
    executor, serving = paced
    handles = [serving.submit([n], LONG) for n in range(1, 7)]
    assert not serving.stop(timeout=0.05)
    with pytest.raises(EngineStopped, match="that was stopped"):
        serving.submit([9], LONG)
    executor.steps.release(1000)
    assert all(serving.stop() for _ in range(3))
    assert [len(handle.result(0).tokens) for handle in handles] == [30] * 6


def test_a_stop_without_a_drain_ends_what_is_open_also_while_another_drains(paced):
    executor, serving = paced
    handles = [serving.submit([n], LONG) for n in range(1, 7)]
    drains = [threading.Thread(target=serving.stop) for _ in range(3)]
    for drain in drains:
        drain.start()
    assert executor.begun.wait(SECONDS)
    serving.stop(drain=False, timeout=0)
    executor.steps.release()
    for thread in drains:
        thread.join(SECONDS)
        assert not thread.is_alive()
    for handle in handles:
        with pytest.raises(EngineStopped, match="that was stopped"):
            handle.result(SECONDS)
    assert _used(serving.engine) == 0 and not serving.engine.has_work


def test_a_block_that_an_exception_leaves_does_not_wait_for_requests(paced):
    executor, serving = paced
    executor.steps.release(1)
    with pytest.raises(KeyError), serving:
        handle = serving.submit([1], LONG)
        next(iter(handle))
        executor.steps.release(1)
        raise KeyError
    assert not serving.is_serving


def test_a_result_that_does_not_come_in_time_can_be_waited_for_again(paced):
    executor, serving = paced
    handle = serving.submit([1], LONG)
    for _ in range(3):
        with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
            handle.result(0.01)
    assert not handle._enders
    executor.steps.release(1000)
    assert len(handle.result(SECONDS).tokens) == 30


def test_nothing_runs_while_there_is_nothing_to_do():
    with AsyncEngine(_engine()) as serving:
        serving.submit([1], LONG).result(SECONDS)
        before = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - before < 0.1


def test_one_that_is_dropped_stops_when_its_requests_are_gone_too():
    serving = AsyncEngine(_engine())
    thread, gone = serving._owner._thread, weakref.ref(serving)
    handle = serving.submit([1], LONG)
    del serving
    gc.collect()
    assert len(handle.result(SECONDS).tokens) == 30 and thread.is_alive()
    del handle
    thread.join(SECONDS)
    gc.collect()
    thread.join(SECONDS)
    assert gone() is None and not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_is_told_and_does_not_wait():
    with AsyncEngine(_engine()) as serving:
        serving.submit([1], LONG).result(SECONDS)
        child = os.fork()
        if not child:
            code = 1
            try:
                serving.stop()
                serving.submit([1], LONG)
            except EngineStopped as error:
                code = 0 if "forked" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert serving.submit([2], LONG).result(SECONDS).tokens[0] == 3


EXIT = """
from tests.compiled_attn.engine.counting import CONFIG, Counting
from compiled_attn import AsyncEngine
from compiled_attn.engine import Engine, SamplingParams
serving = AsyncEngine(Engine(Counting(), CONFIG))
handles = [serving.submit([n], SamplingParams(max_new_tokens=30)) for n in range(1, 60)]
print(next(iter(handles[0])).token)
"""


def test_an_interpreter_that_exits_waits_for_nothing():
    done = subprocess.run(
        [sys.executable, "-c", EXIT],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "2", "")
