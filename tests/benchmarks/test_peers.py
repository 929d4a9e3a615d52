"""The comparison with peers, on fake systems: no peer is installed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra hf")
groups = pytest.importorskip("peers.groups", reason="needs the benchmarks' folder")
if not Path("/proc/self/stat").exists():
    pytest.skip("the benchmark reads /proc", allow_module_level=True)

from peers import environments, table  # noqa: E402
from peers.contest import Contest  # noqa: E402
from peers.environments import TORCH, Environment  # noqa: E402
from peers.rounds import Cell, measure, warm_up  # noqa: E402
from peers.servers import PeerGone, Served, Server  # noqa: E402
from peers.systems import BENCHMARKS, PEERS, System, Task  # noqa: E402
from peers.workers.batch import generate_batch  # noqa: E402
from peers.workers.ours import serving  # noqa: E402
from peers.workloads import Workload, workloads  # noqa: E402

from compiled_attn.engine import Engine, EngineConfig  # noqa: E402
from compiled_attn.workloads import Arrival  # noqa: E402
from tests.compiled_attn.tiny import plain_generate, tiny_model  # noqa: E402

FAKE = Path(__file__).with_name("fake_worker.py")
REQUESTS = Workload("few", (Arrival(0, 5, 3), Arrival(0, 9, 2)))


def fake(task: Task, number: int = 0, fails_at: int = -1) -> Server:
    options = [f"--model={task.model}", f"--dtype={task.dtype}", f"--state={task.cache}"]
    command = [sys.executable, str(FAKE), str(number), str(fails_at), *options]
    paths = os.pathsep.join((str(BENCHMARKS), str(BENCHMARKS.parent)))
    variables = {**os.environ, "PYTHONPATH": paths}
    command += ["--threads=1", "--kv-bytes=1"]
    return Server(command, variables, BENCHMARKS, task.cache / f"{number}.log")


@dataclass(frozen=True)
class Fake(System):
    number: int = 0
    fails_at: int = -1

    def start(self, task: Task) -> Server:
        return fake(task, self.number, self.fails_at)


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return Task(tmp_path, "float32", 1, tmp_path)


def states(session: int) -> set[str]:
    found = (Path(f"/proc/{pid}/stat").read_text() for pid in groups.members(session))
    return {line.rpartition(")")[2].split()[0] for line in found}


def until(holds: Callable[[], bool]) -> None:
    """Waits up to 30 s, as other processes may use the cores."""
    for _ in range(3000):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("expected it within 30 s")


def test_a_stopped_process_group_spends_no_cpu_time():
    busy = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'while True: 0']).wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", busy], start_new_session=True)
    try:
        until(lambda: groups.cpu_seconds(process.pid) > 0.2)
        assert len([*groups.members(process.pid)]) == 2
        assert groups.peak_bytes(process.pid) > 2**20
        groups.send(process.pid, signal.SIGSTOP)
        until(lambda: states(process.pid) == {"T"})
        stopped = groups.cpu_seconds(process.pid)
        time.sleep(0.1)
        assert groups.cpu_seconds(process.pid) == stopped
        groups.send(process.pid, signal.SIGCONT)
        until(lambda: groups.cpu_seconds(process.pid) > stopped + 0.1)
    finally:
        groups.send(process.pid, signal.SIGKILL)
        process.wait()


def test_a_server_runs_only_while_it_serves_and_ends_with_its_children(task: Task):
    server = fake(task, number=100)
    session = server._process.pid
    try:
        assert server.started.cpu_seconds > 0
        assert server.started.versions == {"pytest": pytest.__version__}
        for _ in range(2):
            until(lambda: states(session) == {"T"})
            served = server.serve([[1, 2], [3]], [2, 1])
            assert served.tokens == [[102, 102], [103]]
            assert served.seconds < 60
        assert len([*groups.members(session)]) == 2
    finally:
        server.close()
    until(lambda: states(session) <= {"Z"})  # init reaps the child


def test_a_server_that_does_not_start_reports_why(task: Task):
    with pytest.raises(PeerGone, match=r"exit code 1; ValueError: there is no such model"):
        fake(task, fails_at=0)


def test_a_killed_server_reports_the_signal(task: Task):
    server = fake(task)
    server._process.kill()
    with pytest.raises(PeerGone, match="ended by SIGKILL"):
        server.serve([[1]], [1])


def test_a_failing_peer_is_left_out_with_its_reason(task: Task):
    same, other = Fake("same", ""), Fake("other", "", number=1)
    dies, absent = Fake("dies", "", number=2, fails_at=3), Fake("absent", "", fails_at=0)
    with Contest(task) as contest:
        for system in (Fake("ours", ""), same, other, dies, absent):
            contest.start(system, is_warm=True)
        warm_up(contest)
        cells = measure(contest, REQUESTS, vocabulary=50, rounds=2)
        text = "\n".join(table.starts(contest))
    assert [*cells] == ["ours", "same", "other"]
    assert contest.gone.keys() == {"dies", "absent"}
    assert "MemoryError: too many requests" in contest.gone["dies"]
    assert "absent is left out: ended with exit code 1" in text
    assert cells["same"].equal(cells["ours"]) == 1
    assert cells["other"].equal(cells["ours"]) == 0
    first, second = (each.tokens for each in cells["ours"].rounds)
    assert first != second, "each round has tokens of its own"


def test_a_cold_start_begins_without_state(task: Task):
    system = Fake("fake", "")
    left = system.state(task) / "left"
    left.parent.mkdir(parents=True)
    left.write_text("")
    with Contest(task) as contest:
        contest.start(system, is_warm=False)
        assert not left.exists()
        assert contest.cold.keys() == contest.second.keys() == {"fake"}


def test_ratios_compare_the_same_round_and_equal_tokens_end_at_the_first_difference():
    ours = Cell([Served(1, 2, [[1, 2, 3, 4]]), Served(4, 2, [[5, 6]]), Served(2, 2, [[7, 8]])])
    peer = Cell([Served(3, 1, [[1, 2, 9, 4]]), Served(8, 1, [[5, 6]]), Served(3, 1, [[0, 8]])])
    assert peer.over(ours, "seconds") == 2
    assert peer.equal(ours) == (2 + 2 + 0) / 8
    lines = [*table.rows(REQUESTS, {"ours": ours, "peer": peer}, {"ours": 1, "peer": 2})]
    assert lines[0].strip() == "few: 2 requests, 14 + 5 tokens in all"
    assert lines[-1].split() == ["peer", "2", "3.00", "1.00", "2.00x", "0.50x", "50.0%"]


def test_a_failing_install_reports_the_error_of_pip():
    fails = "import sys; print('ERROR: no matching distribution', file=sys.stderr); sys.exit(1)"
    with pytest.raises(PeerGone, match="pip failed: ERROR: no matching distribution"):
        environments._run("pip", sys.executable, "-c", fails)


def test_an_environment_is_created_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr(environments, "_run", lambda what, *command: ran.append(command))
    monkeypatch.setattr(environments, "_drop_misfits", lambda python: None)
    (tmp_path / "peer").mkdir()
    environment = Environment("peer", ("wanted==1",))
    for _ in range(2):
        python = environment.python(tmp_path, "https://index")
    assert python == tmp_path / "peer/bin/python"
    assert len(ran) == 3
    assert TORCH in ran[1] and "https://index" in ran[1]
    assert "wanted==1" in ran[2] and "https://index" not in ran[2]
    Environment("peer", ("wanted==2",)).python(tmp_path, None)
    assert len(ran) == 6, "other packages, another environment"


def test_openvino_runs_bfloat16_on_two_threads(task: Task):
    openvino = next(each for each in PEERS if each.name == "openvino")
    half = Task(task.model, "bfloat16", 1, task.cache)
    assert (openvino.threads(task), openvino.threads(half)) == (1, 2)


def test_a_workload_without_its_trace_is_skipped_with_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    found = [str(each) for each in workloads(("decode", "trace", "long"), tmp_path / "none")]
    assert found == ["decode: 16 x (128 + 64)", "long: 1 x (6,000 + 32)"]
    assert capsys.readouterr().out.startswith("# trace: skipped, no such file")


@pytest.mark.slow
def test_ours_and_generate_batch_serve_the_tokens_of_generate():
    engine = Engine(tiny_model(), EngineConfig(backend="eager", kernel="portable", max_seqs=4))
    engine.warmup()
    prompts, new = REQUESTS.prompts(128, seed=0), REQUESTS.new
    plain = tiny_model()
    expected = [plain_generate(plain, *each) for each in zip(prompts, new, strict=True)]
    assert serving(engine)(prompts, new) == expected
    assert generate_batch(tiny_model(), 64)(prompts, new) == expected
