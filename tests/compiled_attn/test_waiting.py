"""Threads sleep while they wait where others need the processors, and spin where nobody does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from compiled_attn import waiting
from compiled_attn.waiting import busy_processors, choose_waiting, why_slow

IDLE, BUSY = (0, 100), (100, 0)


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not loaded torch, and whose user has set nothing."""
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(waiting, "cpu_quota", lambda: None)
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # so that what is set below is undone
        monkeypatch.delenv(name)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Makes a machine of processors 0, 1, ..., each busy and idle for so many ticks."""
    path = tmp_path / "stat"
    monkeypatch.setattr(waiting, "_STAT", path)

    def stat(rows: list[tuple[int, int]]) -> str:
        lines = [f"cpu{n} {busy} 0 7 {idle} 0 0 0 0 0 0" for n, (busy, idle) in enumerate(rows)]
        return "\n".join(["cpu 1 2 3 4 5 6 7 8 9 10", *lines, "intr 5 6", "ctxt 7"])

    def make(*spent: tuple[int, int], usable: int | None = None) -> None:
        path.write_text(stat([(1000, 2000)] * len(spent)))
        after = stat([(1000 + busy, 2000 + idle) for busy, idle in spent])
        monkeypatch.setattr(waiting.time, "sleep", lambda _: path.write_text(after))
        monkeypatch.setattr(waiting, "_usable", lambda: set(range(usable or len(spent))))

    return make


def test_busy_processors_are_counted_among_those_that_this_process_may_use(machine):
    machine(IDLE, BUSY, (50, 50), BUSY)
    assert busy_processors() == pytest.approx(2.5)
    machine(IDLE, BUSY, (50, 50), BUSY, usable=3)
    assert busy_processors() == pytest.approx(1.5)


def test_the_time_of_work_that_is_done_meanwhile_does_not_count(machine, monkeypatch):
    machine(BUSY, BUSY)
    clock = iter([0.0, 1.0])
    monkeypatch.setattr(waiting.time, "process_time", lambda: next(clock))
    monkeypatch.setattr(waiting.time, "perf_counter", iter([0.0, 1.0, 1.0]).__next__)
    done = []
    assert busy_processors(work=lambda: done.append(1)) == pytest.approx(1.0)
    assert done == [1]


def test_a_real_machine_has_no_more_busy_processors_than_processors():
    busy = busy_processors(0.05)
    assert busy is None or 0 <= busy <= (os.cpu_count() or 1)


def test_where_threads_and_others_need_more_processors_than_there_are_they_wait_passively(
    unloaded, machine
):
    machine(IDLE, BUSY)
    assert choose_waiting(None) == "passive: others keep 1.0 of 2 processors busy"
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


@pytest.mark.parametrize(
    ("spent", "count"), [([IDLE, (20, 80)], None), ([IDLE, BUSY, BUSY, IDLE], 2)]
)
def test_where_there_is_room_for_all_they_wait_actively(unloaded, machine, spent, count):
    machine(*spent)
    assert choose_waiting(count).startswith("active: others keep ")
    assert "OMP_WAIT_POLICY" not in os.environ


def test_the_number_of_threads_by_default_is_that_of_openmp(unloaded, machine, monkeypatch):
    for wanted, chosen in (("3,2", "active"), ("4", "passive")):
        machine(IDLE, BUSY, IDLE, IDLE)
        monkeypatch.setenv("OMP_NUM_THREADS", wanted)
        assert choose_waiting(None).startswith(chosen)


def test_one_thread_waits_for_nobody(unloaded, machine):
    machine(BUSY)
    assert choose_waiting(1) == choose_waiting(None) == "none: one thread"
    assert "OMP_WAIT_POLICY" not in os.environ


@pytest.mark.parametrize(
    ("quota", "count", "chosen"), [(2.0, "2", "active"), (1.5, "2", "passive"), (0.5, "1", "none")]
)
def test_a_quota_gives_threads_by_default_and_is_told(
    unloaded, machine, monkeypatch, quota, count, chosen
):
    machine(IDLE, IDLE, IDLE, IDLE)
    monkeypatch.setattr(waiting, "cpu_quota", lambda: quota)
    told = choose_waiting(None)
    assert told.startswith(f"{chosen}: ")
    assert told.endswith(f"; a quota gives {quota:.3g} of 4 processors")
    assert os.environ["OMP_NUM_THREADS"] == count


@pytest.mark.parametrize("asked", ["--threads", "OMP_NUM_THREADS"])
def test_threads_that_a_quota_cannot_hold_wait_passively(unloaded, machine, monkeypatch, asked):
    machine(IDLE, IDLE, IDLE, IDLE)
    monkeypatch.setattr(waiting, "cpu_quota", lambda: 2.0)
    if asked == "OMP_NUM_THREADS":
        monkeypatch.setenv(asked, "3")
    assert choose_waiting(3 if asked == "--threads" else None).startswith("passive: ")
    assert os.environ.get("OMP_NUM_THREADS") == ("3" if asked == "OMP_NUM_THREADS" else None)


def test_a_quota_of_all_processors_says_nothing(unloaded, machine, monkeypatch):
    machine(IDLE, IDLE)
    monkeypatch.setattr(waiting, "cpu_quota", lambda: 2.0)
    assert choose_waiting(None) == "active: others keep 0.0 of 2 processors busy"
    assert "OMP_NUM_THREADS" not in os.environ


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_what_the_user_has_set_stays(unloaded, machine, monkeypatch, name):
    machine(BUSY, BUSY)
    monkeypatch.setenv(name, "7")
    assert choose_waiting(2) == f"as set: {name}=7"
    assert os.environ[name] == "7"


def test_a_system_that_does_not_tell_its_load_changes_nothing(unloaded, monkeypatch, tmp_path):
    monkeypatch.setattr(waiting, "_STAT", tmp_path / "none")
    monkeypatch.setattr(waiting, "_usable", lambda: {0, 1})
    assert choose_waiting(2) == "active: this system does not report how busy it is"


def test_where_torch_is_loaded_nothing_can_be_changed(machine, monkeypatch):
    monkeypatch.setattr(waiting, "cpu_quota", lambda: None)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    machine(BUSY, BUSY)
    assert choose_waiting(2) == "as it was when torch was loaded"
    assert "OMP_WAIT_POLICY" not in os.environ


LOAD = """
import ctypes, sys
from compiled_attn import waiting
waiting.busy_processors = lambda **_: 99.0
print(waiting.choose_waiting(2))
ctypes.CDLL(sys.argv[1])
"""


def test_the_openmp_that_torch_brings_reads_the_choice():
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    library = Path(spec.origin).parent / "lib" / "libgomp.so.1"
    if not library.exists():
        pytest.skip("this torch brings another OpenMP than GNU's")
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    env = {key: value for key, value in os.environ.items() if key not in names}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(library)],
        env=env | {"OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("passive: others keep 99.0 of ")
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr
    assert "GOMP_SPINCOUNT = '0'" in done.stderr


def test_where_torch_is_loaded_it_says_why_threads_are_slow_and_what_helps(
    machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    machine(BUSY, IDLE)
    assert not why_slow(1)
    advice = why_slow(2)
    assert "others keep 1.0 of 2 processors busy" in advice
    assert "OMP_WAIT_POLICY=PASSIVE" in advice
    machine(IDLE, IDLE)
    assert not why_slow(2)
    machine(BUSY, IDLE)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert not why_slow(2)
