"""Limits of control groups: of a container, of a service, of what is around them."""

from __future__ import annotations

import os

import pytest

from graphs import cgroups
from graphs.cgroups import cgroup_folders, cpu_quota, usable_cores


@pytest.fixture
def system(monkeypatch, tmp_path):
    """Files of a system without limits; returns a function that writes one of them."""
    monkeypatch.setattr(cgroups, "_MEMBERSHIP", tmp_path / "self")
    monkeypatch.setattr(cgroups, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)

    def write(path: str, text: object) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{text}\n")

    return write


def test_without_a_group_all_processors_are_usable(system):
    assert cpu_quota() is None and usable_cores() == 8


@pytest.mark.parametrize("where", ["cgroup/outer/job", "cgroup/outer", "cgroup"])
@pytest.mark.parametrize(
    ("text", "quota", "cores"),
    [
        ("200000 100000", 2.0, 2),
        ("150000 100000", 1.5, 2),
        ("5000 100000", 0.05, 1),
        ("9900000 100000", 99.0, 8),
        ("max 100000", None, 8),
        ("", None, 8),
    ],
)
def test_a_quota_of_the_second_version_counts_rounded_up(system, where, text, quota, cores):
    system("self", "0::/outer/job")
    system(f"{where}/cpu.max", text)
    assert cpu_quota() == quota and usable_cores() == cores


@pytest.mark.parametrize(("spent", "quota", "cores"), [(250000, 2.5, 3), (-1, None, 8)])
def test_a_quota_of_the_first_version_counts_rounded_up(system, spent, quota, cores):
    system("self", "3:memory:/x\n4:cpu,cpuacct:/job\n1:name=systemd:/y")
    system("cgroup/cpu/job/cpu.cfs_quota_us", spent)
    system("cgroup/cpu/job/cpu.cfs_period_us", 100000)
    assert cpu_quota() == quota and usable_cores() == cores


def test_the_smallest_of_several_quotas_holds(system):
    system("self", "0::/outer/job")
    system("cgroup/outer/job/cpu.max", "400000 100000")
    system("cgroup/outer/cpu.max", "300000 100000")
    assert usable_cores() == 3


def test_folders_go_from_the_group_to_the_outermost(system, tmp_path):
    system("self", "0::/outer/job")
    root = tmp_path / "cgroup"
    assert [*cgroup_folders("cpu")] == [(2, root / "outer/job"), (2, root / "outer"), (2, root)]
