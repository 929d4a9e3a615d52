"""Plans that one process has measured are found by the next."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from compiled_attn.ops.triton.plans import Plans
from compiled_attn.ops.triton.register import measured_plans
from compiled_attn.ops.triton.tiles import Plan, Problem, Tile
from tests.compiled_attn.ops.kernels import interpreted

ONE = Problem(4, 4, 2, 2, 16, 16, 128, 8, "float32", "none")
OTHER = Problem(8, 8, 2, 2, 16, 16, 128, 8, "float32", "none")
CPU = torch.device("cpu")
FOUND = Plan(Tile(16, 32, 4, 2), 3)


@pytest.fixture
def warmup(monkeypatch, tmp_path):
    """Runs problems in a warmup of a new process; returns what was measured and what was taken."""
    interpreted()
    from compiled_attn.ops.triton import autotune, plan_file

    measured = []

    def tune(problem, device):
        measured.append(problem)
        return FOUND

    monkeypatch.setattr(autotune, "tune", tune)

    def run(*problems, file=tmp_path / "plans.json"):
        measured.clear()
        plans = Plans()
        with plan_file.saved_plans(file, CPU, plans):
            taken = [plans.of(problem, CPU) for problem in problems]
        assert plans.measure is None
        return [*measured], taken

    run.file = tmp_path / "plans.json"
    return run


def test_what_was_measured_is_taken_at_the_next_start(warmup):
    assert warmup(ONE) == ([ONE], [FOUND])
    assert warmup(ONE, OTHER) == ([OTHER], [FOUND, FOUND])
    assert warmup(OTHER, ONE) == ([], [FOUND, FOUND])


def test_an_interrupted_warmup_keeps_what_it_measured(warmup):
    from compiled_attn.ops.triton.plan_file import saved_plans

    plans = Plans()
    with pytest.raises(KeyboardInterrupt), saved_plans(warmup.file, CPU, plans):
        plans.of(ONE, CPU)
        raise KeyboardInterrupt
    assert plans.measure is None and warmup(ONE)[0] == []


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"a": [1, 2]}', '{"a": "b"}', '{"a": [1,2,3,4,-1]}']
)
def test_a_damaged_file_is_none_and_is_written_anew(warmup, text):
    warmup.file.write_text(text)
    assert warmup(ONE)[0] == [ONE]
    assert [*json.loads(warmup.file.read_text())] == [ONE.name]


def test_where_nothing_can_be_written_they_are_measured_each_time(warmup):
    for _ in range(2):
        assert warmup(ONE, file=None)[0] == [ONE]


def test_on_a_cpu_nothing_is_measured():
    with measured_plans(CPU) as notes:
        pass
    assert notes == {}


def test_another_flash_attention_has_plans_of_its_own(monkeypatch):
    interpreted()
    from compiled_attn.ops.providers import varlen
    from compiled_attn.ops.triton import plan_file

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    files = set()
    for active in (None, "FA3", "FA3"):
        monkeypatch.setattr(
            varlen,
            "import_module",
            lambda name, active=active: SimpleNamespace(
                current_flash_attention_impl=lambda: active
            ),
        )
        files.add(plan_file.plans_file(torch.device("cuda:0")))
    assert len(files) == 2
