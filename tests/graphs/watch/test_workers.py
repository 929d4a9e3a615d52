"""Real worker processes, forked and spawned; compiles only trace."""

from __future__ import annotations

import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.process import BaseProcess

import pytest
import torch

from graphs import CompileWatch, GraphBudgetExceeded, WorkerWatch, no_compile

FORK = multiprocessing.get_context("fork")
SPAWN = multiprocessing.get_context("spawn")
START = BaseProcess.start


def twice(x):
    return x * 2


compiled = torch.compile(twice, backend="eager", dynamic=False)


def compile_at(*sizes):
    for size in sizes:
        compiled(torch.ones(size))


def compile_and_die(size):
    compile_at(size)
    os.kill(os.getpid(), signal.SIGKILL)


def compile_in_a_child(size):
    child = FORK.Process(target=compile_at, args=(size,), name="grandchild")
    child.start()
    child.join()


def compile_on_request(requests, done):
    for size in iter(requests.get, None):
        try:
            compile_at(size)
            done.put("")
        except GraphBudgetExceeded as error:
            done.put(str(error))


class Own(FORK.Process):
    """A process with a `run` of its own, and state that must not change."""

    def run(self):
        compile_at(3)


@pytest.fixture(autouse=True)
def nothing_compiled_and_nothing_replaced():
    torch._dynamo.reset()
    yield
    assert BaseProcess.start is START


def run(*processes):
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def test_forked_workers_report_also_if_killed_and_so_do_their_children():
    with no_compile(strict=False, workers=True) as sentinel:
        processes = [
            FORK.Process(target=compile_at, args=(2, 3), name="two"),
            FORK.Process(target=compile_and_die, args=(4,), name="killed"),
            FORK.Process(target=compile_in_a_child, args=(5,), name="parent"),
            Own(name="own"),
        ]
        assert run(*processes) == [0, -signal.SIGKILL, 0, 0]
        assert "run" not in vars(processes[3])
        found = sorted((event.worker.split(" (")[0], event.kind) for event in sentinel.events)
    assert found == [
        ("grandchild", "compile"),
        ("killed", "compile"),
        ("own", "compile"),
        ("two", "compile"),
        ("two", "recompile"),
    ]
    event = next(event for event in sentinel.events if event.kind == "recompile")
    assert event.function == "twice" and event.file == __file__
    assert "expected 2, actual 3" in event.reason and "in two (process " in str(event)


# Not a function of this module, which would import torch.
SPAWNED = """
import sys
assert "graphs.watch.workers" in sys.modules and "torch" not in sys.modules
import torch
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
"""


def test_a_spawned_worker_reports_and_imports_no_torch_by_itself():
    with no_compile(strict=False, workers=True) as sentinel:
        assert run(SPAWN.Process(target=exec, args=(SPAWNED, {}), name="spawned")) == [0]
        assert [event.kind for event in sentinel.events] == ["compile"]
    assert "in spawned (process " in str(sentinel.events[0])


def test_workers_that_warm_up_first_are_judged_while_a_sentinel_is_armed():
    with WorkerWatch() as workers:
        requests, done = FORK.SimpleQueue(), FORK.SimpleQueue()
        process = FORK.Process(target=compile_on_request, args=(requests, done), name="server")
        process.start()

        def request(size):
            requests.put(size)
            return done.get()

        assert request(2) == ""
        assert workers.processes == {process.pid: "server"}
        with no_compile(workers=workers) as strict:
            assert request(2) == ""
        assert strict.events == ()
        in_server = pytest.raises(GraphBudgetExceeded, match=r"recompile of twice .* in server")
        with in_server, no_compile(workers=workers):
            assert "recompile of twice" in request(3)
        assert request(4) == ""
        with no_compile(strict=False, workers=workers) as counting:
            assert request(5) == ""
            assert counting.compiles == 1
        requests.put(None)
        process.join()
    assert (process.exitcode, counting.compiles, strict.compiles) == (0, 1, 0)


def test_the_error_of_a_strict_worker_reaches_the_caller_of_a_pool():
    in_worker = pytest.raises(GraphBudgetExceeded, match="in ForkProcess")
    with in_worker, no_compile(workers=True) as sentinel:
        with ProcessPoolExecutor(1, mp_context=FORK) as pool:
            future = pool.submit(compile_at, 3)
            assert isinstance(future.exception(), GraphBudgetExceeded)
        assert future.exception().event.function == "twice"
    assert len(sentinel.events) == 1


def test_late_captures_and_builds_of_workers_count_and_plain_watches_stay_apart():
    with CompileWatch() as watch, no_compile(strict=False, workers=True) as sentinel:
        assert run(FORK.Process(target=os.system, args=("cc /nothing.c 2> /dev/null",))) == [0]
    assert (sentinel.late_builds, watch.events) == (1, ())


def test_contexts_may_end_in_any_order_and_workers_may_outlive_them():
    one, two = WorkerWatch(), WorkerWatch()
    one.start()
    two.start()
    requests, done = FORK.SimpleQueue(), FORK.SimpleQueue()
    process = FORK.Process(target=compile_on_request, args=(requests, done))
    process.start()
    requests.put(2)
    assert done.get() == ""
    first = no_compile(strict=False, workers=one).arm()
    second = no_compile(strict=False, workers=two).arm()
    requests.put(3)
    assert done.get() == ""
    first.disarm()
    one.stop()
    requests.put(4)
    assert done.get() == ""
    assert (first.compiles, second.compiles) == (1, 2)
    second.disarm()
    two.stop()
    requests.put(5)
    assert done.get() == ""
    requests.put(None)
    process.join()
    assert process.exitcode == 0


def test_a_library_that_replaces_start_too_may_keep_ours_in_its_chain(monkeypatch):
    monkeypatch.setattr(BaseProcess, "start", START)
    for _ in range(2):
        with WorkerWatch() as workers:
            ours = BaseProcess.start
            monkeypatch.setattr(BaseProcess, "start", lambda self, ours=ours: ours(self))
            process = FORK.Process(target=compile_at, args=(2,))
            assert run(process) == [0]
            assert [*workers.processes] == [process.pid]
    assert run(FORK.Process(target=compile_at, args=(2,))) == [0]
    monkeypatch.undo()


def test_a_worker_that_cannot_be_watched_is_logged(caplog):
    with caplog.at_level("WARNING", "graphs"), no_compile(workers=True):
        process = FORK.Process(target=print)
        vars(process)["_after_fork"] = lambda: os._exit(3)
        process.start()
        process.join()
    assert f"(process {process.pid})" in caplog.text


def test_what_is_no_watch_or_not_started_is_refused():
    with pytest.raises(TypeError, match="expected True, False or a WorkerWatch, got a int"):
        no_compile(workers=2)
    sentinel = no_compile(workers=WorkerWatch())
    with pytest.raises(RuntimeError, match="enter it before the workers start"):
        sentinel.arm()
    with WorkerWatch() as workers, pytest.raises(RuntimeError, match="make a second one"):
        workers.start()
    with no_compile():  # nothing is left armed
        pass
