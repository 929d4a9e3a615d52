import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from graphs.warmup.workers import Workers, why_no_workers

pytestmark = pytest.mark.skipif(bool(why_no_workers()), reason=why_no_workers() or "forks")


def noting(folder):
    def work(job):
        (folder / f"{job}").write_text(str(os.getpid()))

    return work


def pids_in(folder):
    return {int(file.read_text()) for file in folder.iterdir()}


def test_every_job_comes_back_once_and_is_done_at_most_once(tmp_path):
    with Workers(20, 2, noting(tmp_path)) as workers:
        jobs = []
        for job in workers:
            jobs.append(job)
            time.sleep(0.01)
    assert sorted(jobs) == [*range(20)]
    assert tmp_path.joinpath("19").exists() or len([*tmp_path.iterdir()]) < 20
    assert os.getpid() not in pids_in(tmp_path)


def test_without_workers_the_jobs_come_in_order():
    with Workers(5, 0, lambda job: None) as workers:
        assert [*workers] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("end", [lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: sys.exit(3)])
def test_the_jobs_of_a_worker_that_dies_are_left_to_this_process(end):
    with Workers(4, 2, lambda job: end()) as workers:
        assert sorted(workers) == [0, 1, 2, 3]


def test_a_job_that_fails_in_a_worker_does_not_end_it(tmp_path):
    def work(job):
        noting(tmp_path)(job)
        raise RuntimeError("no")

    with Workers(3, 1, work) as workers:
        end = time.monotonic() + 30
        while len([*tmp_path.iterdir()]) < 2 and time.monotonic() < end:
            time.sleep(0.02)
        assert [*workers] == [0, 1, 2]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["1", "2"]


def test_a_worker_that_hangs_is_given_up_and_ended():
    with Workers(3, 1, lambda job: time.sleep(600), patience=0.2) as workers:
        time.sleep(0.2)
        assert sorted(workers) == [0, 1, 2]
        (pid,) = workers._pids
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_workers_are_waited_for_until_they_are_to_be_given_up(tmp_path):
    def work(job):
        noting(tmp_path)(job)
        time.sleep(600)

    began = time.monotonic()
    with Workers(3, 1, work, patience=500, until=began + 5) as workers:
        while not [*tmp_path.iterdir()] and time.monotonic() < began + 60:
            time.sleep(0.02)
        assert sorted(workers) == [0, 1, 2]
    assert 5 <= time.monotonic() - began < 200


def test_the_first_job_is_of_this_process(tmp_path):
    with Workers(2, 3, noting(tmp_path)) as workers:
        time.sleep(0.2)
        assert next(iter(workers)) == 0
        assert len(workers._pids) == 1
    assert not tmp_path.joinpath("0").exists()


def test_without_room_for_a_fork_this_process_does_all(monkeypatch, caplog):
    before = descriptors()

    def fork():
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "fork", fork)
    with Workers(3, 2, lambda job: None) as workers:
        assert [*workers] == [0, 1, 2]
    assert "0 of 2 workers" in caplog.text
    assert descriptors() == before


def test_what_a_worker_started_ends_with_it(tmp_path):
    def work(job):
        child = subprocess.Popen(["sleep", "600"])
        (tmp_path / "new").write_text(str(child.pid))
        (tmp_path / "new").rename(tmp_path / "pid")
        child.wait()

    with Workers(2, 1, work):
        end = time.monotonic() + 30
        while not (tmp_path / "pid").exists() and time.monotonic() < end:
            time.sleep(0.02)
    pid = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 30
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert not is_running(pid)


def is_running(pid):
    """Not a zombie either, where nobody reaps what a worker left."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] != "Z"
    except OSError:
        return False


def descriptors():
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None


def test_an_error_in_the_with_statement_ends_the_workers_and_closes_the_pipes():
    before = descriptors()
    with pytest.raises(KeyError), Workers(3, 2, lambda job: time.sleep(600)) as workers:
        pids = workers._pids
        raise KeyError
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert descriptors() == before


SCRIPT = """
import os, sys, torch
from torch import nn
from graphs import WarmupManager, linear
class Step(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)
    def forward(self, x):
        return torch.tanh(self.linear(x)) * 2
module = Step()
torch.ones(512, 512) @ torch.ones(512, 512)  # the threads that a fork loses
made = []
def inputs_of(bucket):
    made.append(os.getpid())
    return [torch.ones(bucket.tokens, 32)]
manager = WarmupManager(module, linear(tokens=(16, 16, 32)), inputs_of, workers=2)
report = manager.warmup()
assert len(report.captured) == 2, report
assert set(made) == {os.getpid()}
for bucket in manager.buckets:
    x = torch.randn(bucket.tokens, 32)
    torch.testing.assert_close(manager.run(bucket, x), module(x).detach())
from torch._dynamo.utils import counters
names = [("inductor", "fxgraph_cache_hit"), ("aot_autograd", "autograd_cache_hit")]
print("hits", sum(counters[kind][name] for kind, name in names))
"""


@pytest.mark.slow
def test_what_workers_compile_this_process_finds_in_the_cache(tmp_path):
    from graphs import available_backends

    if reason := available_backends()["inductor"]:
        pytest.skip(reason)
    env = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_VEC_ISA_OK": "1",  # or else it builds a kernel for each to see
        "OMP_NUM_THREADS": "2",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) >= 1
