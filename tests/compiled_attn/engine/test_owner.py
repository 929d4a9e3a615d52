"""The thread that owns an engine: failures and stops end every request."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from compiled_attn import AsyncEngine
from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.engine.logprobs import RowResult
from compiled_attn.errors import EngineStopped, RequestCancelled
from tests.compiled_attn.engine.counting import CONFIG, LONG, SECONDS, Counting, used, warm_engine
from tests.compiled_attn.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[3]


def test_an_error_of_one_request_is_its_own(monkeypatch):
    with AsyncEngine(warm_engine()) as serving:
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
    launch, bad_row = executor.launch, RowResult(error="not finite")
    monkeypatch.setattr(
        executor, "launch", lambda step: [bad_row if r.token == 13 else r for r in launch(step)]
    )
    with AsyncEngine(warm_engine(executor)) as serving:
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
    assert used(serving.engine) == 0


def test_an_event_of_a_step_that_raises_is_delivered(paced, monkeypatch):
    executor, serving = paced
    ends = serving.submit([1], SamplingParams(max_new_tokens=1))
    goes_on = serving.submit([5], LONG)
    assert executor.begun.wait(SECONDS)
    monkeypatch.setattr(serving.engine.scheduler, "finish", lambda *_, **__: 1 / 0)
    executor.steps.release(1000)
    assert ends.result(SECONDS).tokens == [2]
    with pytest.raises(EngineStopped, match="ZeroDivisionError"):
        goes_on.result(SECONDS)


@pytest.mark.parametrize("error", [RuntimeError("gone"), SystemExit("gone")])
def test_an_abort_that_fails_ends_every_request_the_cancelled_one_too(paced, monkeypatch, error):
    executor, serving = paced

    def failing(request_id):
        raise error

    monkeypatch.setattr(serving.engine, "abort", failing)
    cancelled, other = serving.submit([1], LONG), serving.submit([2], LONG)
    assert executor.begun.wait(SECONDS)
    cancelled.cancel()
    executor.steps.release(1000)
    with pytest.raises(RequestCancelled):
        cancelled.result(SECONDS)
    with pytest.raises(EngineStopped, match="gone") as caught:
        other.result(SECONDS)
    assert caught.value.__cause__ is error


def test_a_call_that_ends_the_thread_raises_in_its_caller_too():
    error = SystemExit("took too long")

    def fail(engine):
        raise error

    serving, received = AsyncEngine(warm_engine()), []

    def call():
        with pytest.raises(EngineStopped, match="took too long") as caught:
            serving._owner.call(fail)
        received.append(caught.value.__cause__)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(SECONDS)
    assert received == [error] and not serving.is_serving


def test_a_request_whose_entry_ends_the_thread_ends_too(monkeypatch):
    serving = AsyncEngine(warm_engine())

    def failing(*args, **kwargs):
        raise SystemExit("no entry")

    monkeypatch.setattr(serving.engine, "submit", failing)
    with pytest.raises(EngineStopped, match="no entry"):
        serving.submit([1], LONG).result(SECONDS)


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
    received, go_on = [], threading.Event()
    config = EngineConfig(16, 4, block_size=4, num_blocks=20, backend="eager", context=40)
    with AsyncEngine(Engine(tiny_model(), config), progress=received.append) as serving:
        assert len(serving.submit([1, 2], LONG).result(SECONDS).tokens) == 30
    assert received and serving.engine.warmup_report is not None

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
    assert used(serving.engine) == 0 and not serving.engine.has_work


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
    with AsyncEngine(warm_engine()) as serving:
        serving.submit([1], LONG).result(SECONDS)
        before = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - before < 0.1


def test_one_that_is_dropped_stops_when_its_requests_are_gone_too():
    serving = AsyncEngine(warm_engine())
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
@pytest.mark.parametrize("call", ["submit", "result", "read", "cancel"])
def test_a_forked_process_raises_and_does_not_wait(paced, call):
    executor, serving = paced
    handle = serving.submit([2], LONG)
    calls = {
        "submit": lambda: serving.submit([1], LONG),
        "result": handle.result,
        "read": lambda: list(handle),
        "cancel": lambda: (handle.cancel(), serving.stop(), handle.result()),
    }
    if not (child := os.fork()):
        code = 1
        try:
            calls[call]()
        except EngineStopped as error:
            code = 0 if "forked" in str(error) and not serving.is_serving else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    executor.steps.release(100)
    assert handle.result(SECONDS).tokens[0] == 3


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


def _ends(serving: AsyncEngine) -> bool:
    return serving.stop(drain=False, timeout=SECONDS) and not serving._owner._thread.is_alive()


def test_a_call_in_a_call_is_at_once():
    serving = AsyncEngine(warm_engine())
    report = serving.call(lambda _: serving.call(lambda engine: serving.call(Engine.report)))
    assert report.requests == 0 and serving.is_serving
    assert _ends(serving)


def test_a_call_in_the_progress_of_a_warmup_is_at_once():
    seen, engine, is_made = [], Engine(Counting(), CONFIG), threading.Event()

    def warmup(progress):
        assert is_made.wait(SECONDS)
        progress("a bucket")
        return Counting.warmup(engine.executor)

    engine.executor.warmup = warmup
    serving = AsyncEngine(engine, progress=lambda event: seen.append(serving.call(_is_warm)))
    is_made.set()
    assert serving.call(_is_warm) is True and seen == [False]
    assert _ends(serving)


def _is_warm(engine: Engine) -> bool:
    return engine.warmup_report is not None


@pytest.mark.parametrize("way", ["result", "read", "await", "async read"])
def test_waiting_in_the_engines_own_thread_is_refused(way, paced):
    executor, serving = paced
    handle = serving.submit([7], LONG)
    executor.steps.release(1)

    async def read():
        return [event async for event in handle]

    async def wait():
        return await handle

    ways = {
        "result": handle.result,
        "read": lambda: list(handle),
        "await": lambda: asyncio.run(wait()),
        "async read": lambda: asyncio.run(read()),
    }
    executor.steps.release(1000)
    with pytest.raises(RuntimeError, match="would wait for itself: read requests in another"):
        serving.call(lambda _: ways[way]())
    assert _ends(serving)


def test_what_has_ended_can_be_read_in_the_engines_own_thread():
    serving = AsyncEngine(warm_engine())
    handle = serving.submit([7], LONG)
    handle.result(SECONDS)
    assert len(serving.call(lambda _: list(handle))) == 30
    assert serving.call(lambda _: handle.result()) is handle.result()
    assert _ends(serving)


def test_a_call_within_a_step_is_refused_and_ends_the_engine():
    executor = Counting()
    serving = AsyncEngine(warm_engine(executor))
    launch, executor.launch = executor.launch, lambda step: serving.call(Engine.report)
    handle = serving.submit([7], LONG)
    with pytest.raises(EngineStopped, match="expected a call between two steps"):
        handle.result(SECONDS)
    executor.launch = launch
    assert _ends(serving)


@pytest.mark.parametrize("drain", [False, True])
def test_stop_in_the_engines_own_thread_returns_and_ends_it(drain):
    serving = AsyncEngine(warm_engine())
    assert serving.call(lambda _: serving.stop(drain=drain)) is False
    with pytest.raises(EngineStopped):
        serving.call(Engine.report)
    assert _ends(serving)
