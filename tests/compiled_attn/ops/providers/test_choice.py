"""The fastest kernel is found in a warmup; the report says why others are not used."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from compiled_attn.ops.providers import PROVIDERS
from compiled_attn.ops.triton.plans import REFUSED, Plans
from compiled_attn.ops.triton.tiles import Plan, Problem, Tile
from tests.compiled_attn.ops.kernels import interpreted
from tests.compiled_attn.ops.native_cases import MIXED
from tests.compiled_attn.ops.native_scene import assert_right, scene
from tests.compiled_attn.ops.providers.doubles import BF16

CPU = torch.device("cpu")
PROBLEM = Problem(4, 4, 2, 2, 16, 16, 128, 8, "bfloat16", "none")
TILE = Tile(16, 16, 4, 1)
TIMES = {"triton": 4.0, "slow": 8.0, "fast": 2.0, "faster": 1.0}


class Fake:
    """A provider that has no softcap and counts the calls it serves, by Triton."""

    def __init__(self, name, lacks=None):
        self.name, self.lacks, self.served = name, lacks, 0

    def version(self):
        return "1"

    def why_not(self, call):
        return self.lacks or ("has no softcap" if call.scoring.softcap else None)

    def attend(self, call, paged):
        self.served += 1
        if call.scoring.window:
            raise ValueError("no window\nat line 3")
        return paged(call)


class Other(Fake):
    """A provider with other results: those of Triton times a factor of out and one of lse."""

    def __init__(self, name, *factors):
        super().__init__(name)
        self.factors = factors

    def attend(self, call, paged):
        return tuple(each * factor for each, factor in zip(paged(call), self.factors, strict=True))


@pytest.fixture
def install():
    """Replaces the providers of this process."""
    interpreted()
    before = dict(PROVIDERS)

    def replace(*fakes):
        PROVIDERS.clear()
        PROVIDERS.update({each.name: each for each in fakes})
        return fakes

    yield replace
    replace(*before.values())
    REFUSED.clear()


def clock(run):
    time = TIMES.get(run.args[1].kernel)
    if time is None:
        raise TypeError(f"{run.args[1].kernel} has no pages\nat line 3")
    return time


def kernel_of(problem=PROBLEM):
    from compiled_attn.ops.triton.autotune import tune

    return tune(problem, CPU, clock).kernel


def test_the_fastest_of_those_that_can_is_taken(install):
    install(Fake("slow"))
    assert kernel_of() == "triton"
    install(Fake("slow"), Fake("fast"), Fake("faster", "needs sm_90"))
    assert kernel_of() == "fast"
    install(Fake("faster"), Fake("fast"), Fake("broken"))
    assert kernel_of() == "faster"
    install()
    assert kernel_of() == "triton"


def test_a_kernel_that_no_device_has_run_is_not_measured(install, monkeypatch):
    (fake,) = install(Fake("specialized"))
    monkeypatch.setitem(TIMES, "specialized", 1.0)
    assert kernel_of() == "triton"
    assert fake.served == 0
    assert REFUSED[CPU, PROBLEM, "specialized"] == ("was not run on a device yet", None)


def test_of_equally_fast_kernels_that_of_triton_is_taken(install, monkeypatch):
    monkeypatch.setitem(TIMES, "slow", TIMES["triton"])
    install(Fake("slow"))
    assert kernel_of() == "triton"


def test_a_plan_takes_its_kernel_for_the_calls_that_it_can_serve(install):
    from compiled_attn.ops.triton.launch import attend

    (fake,) = install(Fake("fast"))
    for options, served in (({}, 1), ({"softcap": 2.0}, 1), ({"causal": False}, 2)):
        step = scene(MIXED, dtype=BF16, **options)
        assert_right(attend(step.call, Plan(TILE, 1, "fast")), step)
        assert fake.served == served
    attend(step.call, Plan(TILE, 1))
    assert fake.served == 2


@pytest.fixture
def warmup(install, monkeypatch):
    """Attends calls in a warmup that measures by the clock, and returns its notes."""
    from compiled_attn.ops.triton import autotune, launch, plan_file

    tune = autotune.tune

    def run(*options):
        plans = Plans()
        monkeypatch.setattr(autotune, "tune", partial(tune, clock=clock))
        monkeypatch.setattr(launch, "PLANS", plans)
        with plan_file.saved_plans(None, CPU, plans) as notes:
            for each in options:
                launch.attend(scene(MIXED, dtype=BF16, **each).call)
        launch.attend(scene(MIXED, dtype=BF16).call)  # outside a warmup: not reported
        return notes

    return run


def test_the_report_says_what_each_serves_and_why_it_does_not_serve_the_others(install, warmup):
    install(Fake("fast"), Fake("slow"), Fake("broken"), Fake("faster", "needs sm_90, not sm_80"))
    assert warmup({}, {}, {"softcap": 2.0}) == {
        "fast": "serves 1 of 2 kinds of calls; 1 not, as it has no softcap",
        "slow": "serves 0 of 2 kinds of calls; 1 not, as it was slower than fast: 0.25 of its "
        "speed; 1 not, as it has no softcap",
        "broken": "serves 0 of 2 kinds of calls; 1 not, as it failed: broken has no pages; "
        "1 not, as it has no softcap",
        "faster": "serves 0 of 1 kinds of calls; 1 not, as it needs sm_90, not sm_80",
    }
    assert warmup() == {}


def test_a_provider_that_fails_in_the_warmup_alone_is_not_used_again(install, warmup):
    (fake,) = install(Fake("fast"))
    note = "serves 0 of 1 kinds of calls; 1 not, as it failed: no window"
    assert warmup({"window": 3}, {"window": 3}) == {"fast": note}
    assert fake.served == 2  # when it was compared with Triton, and with the window


def test_a_provider_that_fails_outside_of_a_warmup_is_an_error(install):
    from compiled_attn.ops.triton.launch import attend

    install(Fake("fast"))
    with pytest.raises(ValueError, match="no window"):
        attend(scene(MIXED, dtype=BF16, window=3).call, Plan(TILE, 1, "fast"))


@pytest.mark.parametrize("factors", [(1.0, 1.4427), (1.4, 1.0), (1.0, math.nan), (math.nan, 1.0)])
def test_a_provider_with_other_results_than_triton_is_not_used(install, warmup, factors):
    install(Other("faster", *factors), Fake("fast"))
    notes = warmup({})
    assert notes["fast"] == "serves 1 of 1 kinds of calls"
    assert "1 not, as it failed: out differs by " in notes["faster"]


def test_a_device_without_memory_to_measure_in_has_that_reason(install, warmup, monkeypatch):
    from compiled_attn.ops.triton import autotune

    def full(*_):
        raise torch.OutOfMemoryError

    install(Fake("fast"))
    monkeypatch.setattr(autotune, "call_of", full)
    assert "1 not, as it was not measured: the device is out of memory" in warmup({})["fast"]


def test_plans_of_a_kernel_that_is_not_known_are_measured_again(install, tmp_path, monkeypatch):
    from compiled_attn.ops.triton import autotune, plan_file

    file, measured = tmp_path / "plans.json", []
    monkeypatch.setattr(autotune, "tune", lambda *_: measured.append(None) or Plan(TILE, 1, "fast"))
    for fakes, count in ((["fast"], 1), (["fast"], 1), ([], 2)):
        install(*map(Fake, fakes))
        plans = Plans()
        with plan_file.saved_plans(file, CPU, plans):
            assert plans.of(PROBLEM, CPU) == Plan(TILE, 1, "fast")
        assert len(measured) == count


def test_the_report_joins_speeds_of_one_reason(install):
    from compiled_attn.ops.triton.plans import provider_notes

    slower = "was slower than triton"
    kinds = {("a", PROBLEM._replace(tokens=n), slower): n / 10 for n in (7, 4, 5)}
    assert provider_notes(kinds) == {
        "a": "serves 0 of 3 kinds of calls; 3 not, as it was slower than triton: 0.40 to 0.70 of "
        "its speed"
    }
