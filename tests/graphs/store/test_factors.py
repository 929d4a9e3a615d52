"""Code, shapes, settings and the environment that a graph depends on are in its key."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys

import pytest
import torch
from torch import nn

from graphs.store import environment_factors, graph_factors, key_of
from tests.graphs.store.keys import X, key


def test_the_same_module_has_the_same_key_in_each_process(load):
    net = load()
    assert key(net, X) == key(load(), X)


@pytest.mark.parametrize("name", ["my_store_net", "my_store_helper"])
def test_the_source_of_the_module_and_of_what_it_calls_counts(load, name):
    before = key(load(), X)
    assert key(load(name, "\n\ndef more():\n    pass\n"), X) != before


def test_the_source_of_a_function_that_is_handed_in_counts(load, tmp_path):
    (tmp_path / "my_store_part.py").write_text("def part(x):\n    return x + 1\n")

    def handed():
        sys.modules.pop("my_store_part", None)
        net = load()
        net.part = importlib.import_module("my_store_part").part
        net.stack = [functools.partial(net.part)]
        return net

    before = key(handed(), X)
    assert key(handed(), X) == before
    (tmp_path / "my_store_part.py").write_text("def part(x):\n    return x + 2\n")
    assert key(handed(), X) != before


def test_code_that_was_edited_after_its_import_counts_as_it_was_loaded(load, tmp_path):
    net = load()
    (tmp_path / "my_store_helper.py").write_text("def helper(x):\n    return x + 22\n")
    edited = key(net, X)
    assert key(load(), X) != edited


def transposed(tensor):
    return tensor.detach().t().contiguous().t()


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_strides_of_parameters_and_buffers_count(kind):
    """Of the same shapes, dtypes and devices: inductor bakes the strides into its loops."""

    def net(layout):
        net = nn.Module()
        tensor = layout(torch.arange(16.0).reshape(4, 4))
        if kind == "parameter":
            net.register_parameter("weight", nn.Parameter(tensor))
        else:
            net.register_buffer("table", tensor)
        return net

    plain = net(lambda tensor: tensor)
    assert key(plain, X) == key(net(torch.clone), X)
    assert key(plain, X) != key(net(transposed), X)


def test_weights_do_not_count(load):
    net = load()
    before = key(net, X)
    with torch.no_grad():
        net.linear.weight.zero_()
    assert key(net, X) == before


def test_inputs_backend_options_and_mode_count(load):
    net = load()
    keys = [
        key(net, X),
        key(net, torch.ones(3, 4)),
        key(net, X.double()),
        key(net, torch.ones(4, 2).T),
        key(net, X, 3),
        key(net, X, 4),
        key(net, X, backend="aoti"),
        key(net, X, max_autotune=True),
    ]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        keys.append(key(net, X))
    finally:
        torch.set_num_threads(threads)
    with torch._inductor.config.patch(epilogue_fusion=False):
        keys.append(key(net, X))
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("kind", ["passes", "device", "attention", "mkldnn"])
def test_passes_and_flags_of_torch_count(kind):
    class Pass:
        def uuid(self):
            return "one"

    before = key(torch.relu, X)
    change = {
        "passes": lambda: torch._inductor.config.patch(post_grad_custom_pre_pass=Pass()),
        "device": lambda: torch.device("meta"),
        "attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        "mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    }[kind]
    with change():
        assert key(torch.relu, X) != before
    assert key(torch.relu, X) == before


@pytest.mark.parametrize(
    ("custom", "options"), [(lambda graph: None, {}), (None, {"pass": object()})]
)
def test_a_pass_or_option_whose_effect_is_unknown_means_no_key(custom, options):
    with torch._inductor.config.patch(post_grad_custom_pre_pass=custom):
        assert graph_factors(torch.relu, [X], backend="inductor", options=options) is None


def test_versions_and_the_processor_count(monkeypatch):
    before = key_of(environment_factors())
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert key_of(environment_factors()) != before
    monkeypatch.undo()
    assert key_of(environment_factors()) == before
    monkeypatch.setattr("graphs.store.factors._cpu", lambda: "another processor")
    assert key_of(environment_factors()) != before


def test_an_environment_is_the_same_in_another_process():
    code = "from graphs.store import *; print(key_of(environment_factors()))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == key_of(environment_factors())
