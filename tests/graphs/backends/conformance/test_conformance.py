"""The conformance suite: our backends pass it, and it finds those that are broken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from compiled_attn import pytest_plugin
from graphs.backends import BACKENDS
from graphs.backends.accelerator import AcceleratorBackend
from graphs.backends.conformance import CASES, Case, NotConformant, Refused, Subject, load
from graphs.backends.cudagraph import CudaGraphBackend
from graphs.backends.eager import EagerBackend
from tests.fake_device import open_device
from tests.graphs.backends.conformance.broken import BROKEN
from tests.graphs.backends.dispatch_double import DispatchDouble

ROOT = Path(__file__).resolve().parents[4]
BY_NAME = {case.name: case for case in CASES}
# Of backends that compile, a few in the quick run; all of them take minutes.
QUICK = {
    "inductor": ("writes_to_buffers", "many_graphs"),
    "aoti": (),  # test_aoti compares its writes with eager's
    "onnxrt": ("writes_to_buffers",),
}
SLOW = {"aot_eager": ("many_graphs", "gradients", "memory_of_runs", "memory_of_closed")}


class OnDouble(CudaGraphBackend):
    """Records on a CPU, by a double."""

    device = "cpu"
    options = {**CudaGraphBackend.options, "compiler": "eager"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__(DispatchDouble)


class OnFakeDevice(AcceleratorBackend):
    """Records eager code on the fake device."""

    options = {**AcceleratorBackend.options, "compiler": "eager"}  # noqa: RUF012


def subject_of(name: str) -> Subject:
    if name == "cudagraph on a double":
        return Subject(OnDouble())
    if name in ("eager on the fake device", "accelerator on the fake device"):
        if torch.cuda.is_available():
            pytest.skip("torch has one accelerator a process, and this machine's is a GPU")
        if name.startswith("accelerator") and not hasattr(torch.accelerator, "Graph"):
            pytest.skip("torch 2.13 is the first with torch.accelerator.Graph")
        backend = EagerBackend() if name.startswith("eager") else OnFakeDevice()
        return Subject(backend, open_device())
    if reason := BACKENDS[name].available():
        pytest.skip(reason)
    return load(name)


def run(case: Case, subject: Subject) -> None:
    try:
        case.run(subject)
    except Refused as refused:
        pytest.skip(str(refused))


NAMES = (
    "eager",
    "aot_eager",
    "cudagraph on a double",
    "eager on the fake device",
    "accelerator on the fake device",
    "inductor",
    "aoti",
    "onnxrt",
    "cudagraph",
    "accelerator",
)
ON_GPU = ("cudagraph", "accelerator")


def marks_of(name: str, case: Case) -> list[pytest.MarkDecorator]:
    is_slow = case.name not in QUICK.get(name, (case.name,)) or case.name in SLOW.get(name, ())
    return [pytest.mark.gpu] * (name in ON_GPU) + [pytest.mark.slow] * is_slow


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, marks=marks_of(name, case), id=f"{case.name}-{name}")
        for name in NAMES
        for case in CASES
    ],
)
def test_our_backends_conform(name, case):
    if (name, case.name) == ("eager on the fake device", "gradients"):
        pytest.skip("torch's autograd knows only devices that are there when it first runs")
    run(case, subject_of(name))


@pytest.mark.parametrize("backend", BROKEN, ids=lambda backend: backend.name)
def test_a_broken_backend_is_found_with_the_guarantee(backend):
    for name in BROKEN[backend]:
        with pytest.raises(
            NotConformant, match=rf"{name}: a backend must guarantee that .*'{backend.name}'"
        ):
            BY_NAME[name].run(Subject(backend()))


def test_what_need_not_be_supported_may_be_refused_and_the_rest_not():
    class Refusing(EagerBackend):
        name = "refusing"

        def capture(self, job):
            from graphs import CaptureError

            raise CaptureError(job.name, "no such operator")

    subject = Subject(Refusing())
    with pytest.raises(Refused, match="no such operator"):
        BY_NAME["random_numbers"].run(subject)
    with pytest.raises(NotConformant, match=r"it refuses: .* no such operator"):
        BY_NAME["values"].run(subject)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("nothing", "expected module:name or one of eager"),
        ("no_such_module:Backend", "No module named 'no_such_module'"),
        ("graphs.backends.eager:Missing", "has no attribute 'Missing'"),
        ("math:pi", r"expected a graphs\.capture\.contract\.Backend, got a float"),
    ],
)
def test_what_names_no_backend_is_one_clear_line(backend, message):
    with pytest.raises(ValueError, match=message) as raised:
        load(backend)
    assert "\n" not in str(raised.value)


MODULE = """
from torch.utils import _pytree as pytree

from graphs.backends.eager import EagerBackend
from graphs.capture.contract import Frozen

class Flat(EagerBackend):
    name = "flat"

    def capture(self, job):
        super().capture(job)
        return Frozen(lambda *inputs: tuple(pytree.tree_leaves(job.function(*inputs))))
"""


def pytest_in(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-c", "import sys, pytest; sys.exit(pytest.main())"]
    options = ("-p", "compiled_attn.pytest_plugin", "-p", "no:cacheprovider", "-q", *options)
    return subprocess.run([*command, *options], cwd=folder, env=env, capture_output=True, text=True)


def test_one_option_runs_the_suite_on_a_backend_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "test_other.py").write_text("def test_other():\n    assert False\n")
    few = ("-k", "structures or empty_tensors")
    some = pytest_in(tmp_path, "--graphs-backend", "mine:Flat", *few)
    assert some.returncode == 1 and "1 failed, 1 passed" in some.stdout, some.stdout + some.stderr
    assert "a backend must guarantee that outputs have the structure" in some.stdout
    assert "'flat' does not" in some.stdout


def test_a_backend_that_is_not_there_is_an_error_of_usage():
    options = {"graphs_backend": "math:missing", "graphs_device": None}
    config = SimpleNamespace(getoption=lambda name, default=None: options.get(name, default))
    with pytest.raises(pytest.UsageError, match="has no attribute 'missing'"):
        pytest_plugin.pytest_collection(SimpleNamespace(config=config))
