from __future__ import annotations

import json
import runpy

import pytest

from compiled_attn.testing.fuzz import Operation, Refused, Settings, Trace, command, run
from compiled_attn.testing.fuzz.command import run_command
from tests.compiled_attn.testing.fuzz import toy

TOY = f"{toy.__name__}:Toy"


class Broken(toy.Toy):
    def decode(self, name):
        return [(token + 1) % toy.VOCAB for token in super().decode(name)]


class Kept(toy.Toy):
    """Serves several traces; counts its engines."""

    same_settings = 10
    made = closed = resets = 0

    def __init__(self, settings):
        super().__init__(settings)
        Kept.made += 1

    def reset(self):
        self.resets += 1
        return not self.running

    def close(self):
        Kept.closed += 1


def fuzz(*arguments: object) -> int:
    return run_command([*map(str, arguments), "--size", "20"])


def test_nothing_fails_in_a_correct_engine(tmp_path, capsys):
    report = tmp_path / "report.json"
    assert fuzz("--target", TOY, "--requests", 100, "--json", report) == 0
    found = json.loads(report.read_text())
    assert found["counts"]["requests"] >= 100 and not found["failures"]
    assert "0 failures" in capsys.readouterr().out


def test_kinds_can_be_left_out(tmp_path):
    report = tmp_path / "report.json"
    arguments = "--target", TOY, "--requests", 200, "--json", report
    assert fuzz(*arguments, "--without", "abort", "--without", "preempt") == 0
    assert "aborted" not in json.loads(report.read_text())["counts"]
    assert fuzz(*arguments) == 0
    assert json.loads(report.read_text())["counts"]["aborted"]


def test_a_failure_is_written_as_a_script(tmp_path, capsys):
    path, report = tmp_path / "failure.py", tmp_path / "report.json"
    target = f"{__name__}:Broken"
    assert fuzz("--target", target, "--script", path, "--json", report) == 1
    trace = runpy.run_path(str(path))["TRACE"]
    assert len(trace.operations) == 1 and run(trace, Broken(trace.settings))
    (failure,) = json.loads(report.read_text())["failures"]
    assert Trace.from_json(json.dumps(failure["trace"])) == trace
    assert "1 failures" in capsys.readouterr().out
    replayed = tmp_path / "trace.json"
    replayed.write_text(trace.to_json())
    assert fuzz("--target", target, "--replay", replayed) == 1
    assert fuzz("--target", TOY, "--replay", replayed) == 0


class Crashes(toy.Toy):
    """After an abort with another exception."""

    def step(self):
        new = super().step()
        if self.steps >= 3:
            raise (KeyError if self.aborts else ZeroDivisionError)("third step")
        return new


def test_a_crash_is_not_shrunk_to_another_one(tmp_path):
    path, report = tmp_path / "trace.json", tmp_path / "report.json"
    made = [Operation("submit", request, (1, 2), 9) for request in range(3)]
    operations = *made, Operation("abort", 1), Operation("step", count=5)
    path.write_text(Trace(Settings(), operations).to_json())
    target = f"{__name__}:Crashes"
    assert fuzz("--target", target, "--replay", path, "--json", report) == 1
    (failure,) = json.loads(report.read_text())["failures"]
    assert "KeyError" in failure["failure"]
    kinds = [each["kind"] for each in failure["trace"]["operations"]]
    assert "abort" in kinds and len(kinds) < len(operations)


@pytest.mark.parametrize("line", ["raise RuntimeError('not today')", "raise SystemExit(0)", "x ="])
def test_a_module_that_fails_is_one_line(line, tmp_path, monkeypatch, capsys):
    (tmp_path / "failing_target.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    assert fuzz("--target", "failing_target:Mine") == 2
    error = capsys.readouterr().err
    assert "failing_target" in error and error.count("\n") == 1


def test_runs_add_up(tmp_path):
    total = tmp_path / "sum.json"
    for _ in range(2):
        assert fuzz("--target", TOY, "--steps", 30, "--sum", total) == 0
    found = json.loads(total.read_text())
    assert found["runs"] == 2 and found["counts"]["steps"] >= 60
    assert found["next_seed"] == found["counts"]["traces"]
    with pytest.raises(AssertionError):
        assert fuzz("--target", "ours", "--steps", 1, "--sum", total) == 0


class Stops(toy.Toy):
    """A user interrupts its second trace."""

    made = 0

    def __init__(self, settings):
        super().__init__(settings)
        Stops.made += 1

    def step(self):
        if Stops.made > 1:
            raise KeyboardInterrupt
        return super().step()


def test_an_interrupted_run_loses_one_trace(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_EVERY_S", 0)
    total = tmp_path / "sum.json"
    with pytest.raises(KeyboardInterrupt):
        fuzz("--target", f"{__name__}:Stops", "--sum", total)
    found = json.loads(total.read_text())
    assert found["next_seed"] == found["counts"]["traces"] == 1
    assert found["counts"]["requests"] >= 20


class Refuses(toy.Toy):
    """All requests but those of the first trace."""

    accepts = 20

    def submit(self, *args, **options):
        Refuses.accepts -= 1
        if Refuses.accepts < 0:
            raise Refused
        super().submit(*args, **options)


@pytest.mark.parametrize(
    ("accepted", "limit"), [(20, ("--requests", 100)), (0, ("--steps", 10)), (0, ())]
)
def test_a_target_that_refuses_everything_is_an_error(accepted, limit, monkeypatch, capsys):
    monkeypatch.setattr(Refuses, "accepts", accepted)
    assert fuzz("--target", f"{__name__}:Refuses", *limit) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "refused in a row" in error


def test_an_engine_is_kept_while_its_settings_stay():
    assert fuzz("--target", f"{__name__}:Kept", "--requests", 300) == 0
    assert Kept.made == Kept.closed == 2
    assert fuzz("--target", f"{__name__}:Kept", "--requests", 300, "--keep", 100) == 0
    assert Kept.made == Kept.closed == 3


class OnlyKept(Kept):
    """Fails in its second trace."""

    def step(self):
        return {99: [1]} if self.resets else super().step()


def test_a_failure_of_a_kept_engine_may_need_what_it_served_before(capsys):
    assert fuzz("--target", f"{__name__}:OnlyKept", "--requests", 300) == 1
    assert "passes on a new engine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--target", "mine"], "module:Class"),
        (["--target", "no.such.module:Mine"], "no.such.module"),
        (["--target", "json:loads"], "Target"),
        (["--target", TOY, "--set", "gap"], "KEY=VALUE"),
        (["--target", TOY, "--set", "gab=1"], "gab"),
        (["--target", TOY, "--without", "fork"], "fork"),
        (["--target", TOY, "--replay", "missing.json"], "missing.json"),
        (["--target", TOY, "--script", "/no/folder/x.py"], "/no/folder/x.py"),
        (["--target", TOY, "--sum", "/no/folder/x.json"], "/no/folder/x.json"),
        (["--target", TOY, "--requests", 0], "--requests"),
        (["--target", TOY, "--keep", -1], "--keep"),
    ],
)
def test_bad_input_is_one_line(arguments, names, capsys):
    assert fuzz(*arguments) == 2
    error = capsys.readouterr().err
    assert names in error and error.count("\n") == 1
