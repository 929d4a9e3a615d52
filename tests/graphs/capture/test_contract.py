"""A capture's description: validated once, and handed down unchanged."""

import copy

import torch

from graphs import WarmupManager, capture, explicit
from graphs.backends.eager import EagerBackend
from graphs.backends.inductor import InductorBackend
from graphs.capture.capture import spec_of
from graphs.capture.contract import CaptureSpec, Job

TRACED = InductorBackend("traced", "aot_eager")


class Seen(EagerBackend):
    """Records the specs of its captures."""

    name = "seen"
    options = InductorBackend.options

    def __init__(self):
        self.specs = []

    def capture(self, job):
        self.specs.append(job.spec)
        return super().capture(job)


def test_missing_options_have_the_defaults_of_the_backend():
    spec = CaptureSpec(TRACED, options={"mode": "default"})
    assert dict(spec.options) == {"mode": "default", "options": None, "replays": None}
    assert dict(CaptureSpec(EagerBackend()).options) == {}


def test_keywords_replace_fields_of_a_spec():
    spec = CaptureSpec(TRACED, "step", {"mode": "default"}, warm_runs=2)
    assert spec_of(torch.neg, spec) == spec
    other = spec_of(torch.neg, spec, "draws", strict=False, options={"x": 1})
    assert (other.name, other.strict, other.warm_runs) == ("draws", False, 2)
    assert (other.options["mode"], other.options["options"]) == ("default", {"x": 1})
    assert spec_of(torch.neg, "eager").name == "neg"


def test_one_spec_serves_a_capture_and_a_manager():
    backend = Seen()
    spec = CaptureSpec(backend, "step", {"mode": "default"})
    capture(torch.neg, [torch.ones(2)], backend=spec)
    WarmupManager(
        torch.neg, explicit(["n"], [2]), lambda bucket: [torch.ones(bucket.n)], backend=spec
    ).warmup()
    assert [seen.name for seen in backend.specs] == ["step", "step[n=2]"]
    assert all(seen.options == spec.options for seen in backend.specs)


def test_a_job_has_other_options_without_changing_its_spec():
    job = Job(torch.neg, [torch.ones(2)], CaptureSpec(TRACED, "step"))
    assert job.with_spec(name="other").name == "other" and job.name == "step"
    assert job.graph_name == "step" and job.dims == ()


def test_what_a_user_changes_in_nested_options_later_is_not_in_the_spec():
    options = {"options": {"max_autotune": True}}
    spec = CaptureSpec(TRACED, "step", options)
    options["options"]["max_autotune"] = False
    assert spec.options["options"] == {"max_autotune": True}
    assert copy.deepcopy(dict(spec.options)) == spec.options
