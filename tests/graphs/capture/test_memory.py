import torch

from graphs.capture import memory
from graphs.capture.memory import bytes_in_use


def test_memory_that_is_touched_counts_as_in_use():
    before = bytes_in_use([torch.device("cpu")])
    held = torch.ones(1 << 24)
    grown = bytes_in_use([torch.device("cpu")]) - before
    assert before > 0
    assert grown >= held.nbytes // 2


def test_without_a_proc_file_system_the_host_counts_as_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_STATM", tmp_path / "absent")
    assert bytes_in_use([torch.device("cpu")]) == 0
