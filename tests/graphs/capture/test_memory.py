import subprocess
import sys

import pytest
import torch

from graphs import cgroups
from graphs.capture import memory
from graphs.capture.memory import bytes_in_use, free_bytes, machine_bytes

GIB = 2**30


@pytest.fixture
def system(monkeypatch, tmp_path):
    """Files of a system with 8 GiB available; returns a function that writes one of them."""
    monkeypatch.setattr(memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(cgroups, "_MEMBERSHIP", tmp_path / "proc" / "self" / "cgroup")
    monkeypatch.setattr(cgroups, "_CGROUPS", tmp_path / "cgroup")

    def write(path: str, text: object) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{text}\n")

    write("proc/meminfo", f"MemTotal: 99 kB\nMemAvailable:   {8 * GIB // 1024} kB\nBuffers: 1 kB")
    return write


def test_memory_that_is_touched_counts_as_in_use():
    """In a process of its own: in this one, memory of other tests may be given back meanwhile."""
    code = (
        "import torch; from graphs.capture.memory import bytes_in_use; cpu = torch.device('cpu');"
        "before = bytes_in_use([cpu]); held = torch.ones(1 << 24); after = bytes_in_use([cpu]);"
        "print(before, after - before, held.nbytes)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, grown, size = map(int, done.stdout.split())
    assert before > 0
    assert size // 2 <= grown <= 2 * size


def test_without_a_proc_file_system_the_host_counts_as_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_PROC", tmp_path / "absent")
    assert bytes_in_use([torch.device("cpu")]) == 0
    assert free_bytes() is None


def test_what_is_free_here_is_less_than_what_there_is():
    assert 0 < free_bytes() <= machine_bytes()


def test_without_a_container_what_is_available_is_free(system):
    assert free_bytes() == 8 * GIB
    system("proc/self/cgroup", "0::/user.slice")
    system("cgroup/user.slice/memory.max", "max")
    system("cgroup/user.slice/memory.current", GIB)
    assert free_bytes() == 8 * GIB


@pytest.mark.parametrize(
    ("line", "names", "idle"),
    [
        ("0::/outer/job", ("memory.max", "memory.current"), "inactive_file"),
        (
            "4:memory:/outer/job",
            ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
            "total_inactive_file",
        ),
    ],
)
@pytest.mark.parametrize("where", ["outer/job", "outer", ""])
def test_a_container_has_left_what_no_limit_around_it_forbids(system, line, names, idle, where):
    """Also where the files of the container are at the root, not at its path."""
    system("proc/self/cgroup", f"9:cpu,cpuacct:/elsewhere\n{line}\n1:name=systemd:/x")
    for name, size in zip(names, (4 * GIB, 3 * GIB), strict=True):
        folder, _, file = name.rpartition("/")
        system(f"cgroup/{folder}/{where}/{file}", size)
    assert free_bytes() == GIB
    assert machine_bytes() <= 4 * GIB
    folder = names[0].rpartition("/")[0]
    system(f"cgroup/{folder}/{where}/memory.stat", f"anon 7\n{idle} {GIB}\nslab 5")
    assert free_bytes() == 2 * GIB


def test_a_container_that_uses_more_than_its_limit_has_nothing_left(system):
    system("proc/self/cgroup", "0::/")
    system("cgroup/memory.max", GIB)
    system("cgroup/memory.current", 2 * GIB)
    assert free_bytes() == 0
