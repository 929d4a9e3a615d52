"""The command with replicas: start, refused options, and complete shutdown."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs the extra 'ray'")
pytest.importorskip("openai", reason="needs the extra 'serve'")

from tests.compiled_attn.contrib.replicas.command import ROOT, Command, still_running

pytestmark = [pytest.mark.dist, pytest.mark.slow]

RAY = [sys.executable, "-c", "import sys; from ray.scripts.scripts import main; sys.exit(main())"]


@pytest.fixture
def started(model: Path, tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Starts the command, and stops it after the test."""
    every: list[Command] = []

    def start(*more: str, folder: Path = model, **how) -> Command:
        every.append(Command(folder, tmp_path / f"log{len(every)}", *more, **how))
        return every[-1]

    yield start
    for each in every:
        each.stop()


def test_ctrl_c_ends_all_and_leaves_no_process(started):
    command = started()
    command.wait("ready, 2 of 2 replicas")
    processes = command.processes()
    assert {*command.replicas()} <= {*processes}
    os.killpg(command.process.pid, signal.SIGINT)  # as a terminal does
    assert command.process.wait(60) in (0, 130), command.output
    assert "Traceback" not in command.output
    assert not still_running(processes)


def test_three_replicas_serve(started):
    command = started(replicas=3)
    command.wait("ready, 3 of 3 replicas")
    assert len({*command.replicas()}) == 3
    texts = [command.complete(f"number {at} " * 5) for at in range(9)]
    assert texts == [command.complete(f"number {at} " * 5) for at in range(9)]
    served = command.get("/metrics").splitlines()
    totals = [line for line in served if line.startswith("compiled_attn_requests_total{outcome=")]
    assert sum(float(line.split()[-1]) > 0 for line in totals if "served" in line) == 3


def test_a_model_that_cannot_be_loaded_ends_it_with_the_reason(started, model, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    (broken / "model.safetensors").unlink()
    command = started(folder=broken)
    assert command.process.wait(120) == 2
    assert command.output.count("\n") == 2 and "no file named model.safetensors" in command.output


def test_only_one_replica_ever_compiles(started, tmp_path):
    command = started("--backend=inductor", "--max-graphs=2", XDG_CACHE_HOME=str(tmp_path))
    command.wait("ready, 2 of 2 replicas", seconds=500)
    graphs = command.metric('compiled_attn_graphs{replica="0"}')
    assert graphs >= 1
    assert loaded(command) == [0, graphs]
    text = command.complete("one")
    os.kill(command.replicas()[0], signal.SIGKILL)
    command.wait("ready, 2 of 2 replicas", times=2)
    assert command.metric('compiled_attn_graphs_loaded{replica="0"}') == graphs
    assert [command.complete("one") for _ in range(4)] == [text] * 4


def loaded(command: Command) -> list[float]:
    """Graphs that each of two replicas loaded from the store, sorted."""
    names = [f'compiled_attn_graphs_loaded{{replica="{number}"}}' for number in range(2)]
    return sorted(map(command.metric, names))


def test_a_cluster_serves_and_goes_on(started, tmp_path):
    with cluster(tmp_path) as address:
        command = started(f"--address={address}", RAY_AUTH_MODE="token")
        command.wait("ready, 2 of 2 replicas")
        assert json.loads(command.get("/health"))["status"] == "ready, 2 of 2 replicas"
        text = command.complete("one")
        assert text == command.complete("one")
        replicas = command.replicas()
        command.process.terminate()
        assert command.process.wait(60) == 0, command.output
        assert "Traceback" not in command.output
        again = started(f"--address={address}", replicas=1, RAY_AUTH_MODE="token")
        again.wait("ready, 1 of 1 replicas")
        assert again.complete("one") == text and not {*again.replicas()} & {*replicas}


def test_two_frontends_share_a_cluster(started, tmp_path):
    with cluster(tmp_path) as address:
        each = dict(replicas=1, RAY_AUTH_MODE="token")
        one, other = (started(f"--address={address}", **each) for _ in range(2))
        for command in (one, other):
            command.wait("ready, 1 of 1 replicas")
        assert not {*one.replicas()} & {*other.replicas()}
        text = one.complete("one")
        one.process.terminate()
        assert one.process.wait(60) == 0, one.output
        assert other.complete("one") == text


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """A cluster of this machine alone."""
    port = free_port()
    start = [
        "start",
        "--head",
        "--block",
        f"--port={port}",
        "--num-cpus=4",
        "--include-dashboard=0",
    ]
    settings = os.environ | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    settings |= {"RAY_AUTH_MODE": "token"}
    with (folder / "ray.log").open("w") as log:
        head = subprocess.Popen(
            [*RAY, *start], env=settings, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield f"127.0.0.1:{port}"
    finally:
        head.terminate()
        try:
            head.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def refusal(model: Path, *more: str) -> str:
    """The error line of the command."""
    command = [sys.executable, "-m", "compiled_attn", "serve", str(model), *more]
    settings = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        command, env=settings, capture_output=True, text=True, check=False, timeout=240
    )
    assert run.returncode == 2 and not run.stdout, run.stderr
    assert "Traceback" not in run.stderr and run.stderr.count("\n") == 1, run.stderr
    return run.stderr


def test_a_port_in_use_is_one_line(model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refusal(model, "--replicas=2", "--backend=eager", f"--port={port}")
    assert f"cannot listen at 127.0.0.1:{port}" in line and "choose another --port" in line


def test_an_address_without_replicas_is_one_line(model):
    line = refusal(model, "--address=auto", "--backend=eager", "--port=0")
    assert "--address is for --replicas: give both, or none" in line


@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto", "nonsense"])
def test_where_no_cluster_answers_is_one_line(model, address):
    line = refusal(model, "--replicas=2", f"--address={address}", "--backend=eager", "--port=0")
    assert f"cannot use Ray at {address}" in line and "ray start" in line
