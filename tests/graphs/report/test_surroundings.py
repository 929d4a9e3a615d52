from __future__ import annotations

import json
import os
import subprocess
from datetime import UTC, datetime, timedelta

import pytest
import torch

from graphs.capture.memory import machine_bytes
from graphs.report import surroundings as module
from graphs.report.surroundings import machine, surroundings

X86 = "processor\t: 0\nmodel name\t: Some Xeon(R) 9 @ 2 GHz\nflags\t\t: fpu avx2 {}\n"


@pytest.fixture
def cpuinfo(tmp_path, monkeypatch):
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(module, "_CPUINFO", path)
    return path


def test_a_report_says_when_and_on_what_it_was_made():
    found = surroundings(["typer", "no such package"])
    age = datetime.now(UTC) - datetime.fromisoformat(found["date"])
    assert timedelta(0) <= age < timedelta(minutes=1) and found["date"].endswith("+00:00")
    assert found["threads"] == torch.get_num_threads()
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["no such package"] is None
    assert found["machine"]["memory_bytes"] == machine_bytes()
    assert found["machine"]["cores"] == os.cpu_count() >= found["machine"]["usable_cores"]
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("flags", "avx512", "amx"),
    [("", False, False), ("avx512f", True, False), ("avx512f amx_tile amx_bf16", True, True)],
)
def test_the_processor_and_its_vector_units_are_those_that_the_system_lists(
    cpuinfo, flags, avx512, amx
):
    cpuinfo.write_text(X86.format(flags) * 2)
    found = machine()
    assert (found["cpu"], found["avx512"], found["amx"]) == (
        "Some Xeon(R) 9 @ 2 GHz",
        avx512,
        amx,
    )


def test_where_the_system_lists_numbers_lscpu_names_the_processor(cpuinfo, monkeypatch):
    cpuinfo.write_text("processor : 0\nCPU part : 0xd40\n")
    monkeypatch.setattr("shutil.which", lambda name: name)
    output = subprocess.CompletedProcess([], 0, "Vendor ID: ARM\nModel name:    Neoverse-V1\n", "")
    monkeypatch.setattr("subprocess.run", lambda *args, **kwargs: output)
    found = machine()
    assert (found["cpu"], found["avx512"], found["amx"]) == ("Neoverse-V1", None, None)


def test_without_any_list_there_still_is_a_name(cpuinfo, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert machine()["cpu"] and machine()["avx512"] is None
