"""Every change of a module is named; a change that is undone is none."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from graphs import StaleGraph, capture
from graphs.capture.module_state import DictVersions, ModuleState, has_versions
from graphs.store import ArtifactStore, StoredAoti, StoredInductor
from tests.slow import slow_but

pytestmark = pytest.mark.usefixtures("no_grad")


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act = nn.ReLU()
        self.function = torch.tanh
        self.scale = 0.5

    def forward(self, x):
        return self.function(self.act(self.linear(x))) * self.scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def _double(*arguments):
    return arguments[-1] * 2


CHANGES = {
    "layers.1.linear was replaced": lambda layers: setattr(layers[1], "linear", nn.Linear(4, 4)),
    "layers.2 was replaced": lambda layers: setattr(layers, "2", Layer()),
    "layers.1.act was replaced": lambda layers: setattr(layers[1], "act", nn.GELU()),
    "layers.1.function was replaced": lambda layers: setattr(layers[1], "function", torch.sigmoid),
    "layers.2.scale is 2.0, was 0.5": lambda layers: setattr(layers[2], "scale", 2.0),
    "layers.2.scale was removed": lambda layers: delattr(layers[2], "scale"),
    "layers.1.forward was added": lambda layers: setattr(layers[1], "forward", lambda x: x),
    "layers.1.training is True, was False": lambda layers: layers[1].train(),
    "the forward hooks of layers.1.linear changed": (
        lambda layers: layers[1].linear.register_forward_hook(_double)
    ),
    "the forward pre hooks of layers.1 changed": (
        lambda layers: layers[1].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    ),
    "layers.3 was added": lambda layers: layers.append(Layer()),
}
every_change = pytest.mark.parametrize(("message", "change"), CHANGES.items(), ids=CHANGES)


@pytest.fixture(params=[True, False], ids=["versions", "no versions"])
def _with_and_without_versions(request, monkeypatch):
    if not request.param:
        module = sys.modules[DictVersions.__module__]
        monkeypatch.setattr(module, "has_versions", lambda: False)


@pytest.mark.usefixtures("_with_and_without_versions")
@every_change
def test_a_change_is_named(change, message):
    net = Net().eval()
    state = ModuleState.of(net)
    assert state.changed() == ""
    change(net.layers)
    assert state.changed() == message
    assert state.changed() == message
    now = ModuleState.of(net)
    assert now is not state and now.changed() == ""


@pytest.mark.usefixtures("_with_and_without_versions")
@pytest.mark.parametrize(
    "register", [register_module_forward_hook, register_module_forward_pre_hook]
)
def test_a_hook_of_all_modules_is_named(register):
    state = ModuleState.of(Net())
    handle = register(lambda *arguments: None)
    try:
        assert state.changed().endswith("hooks of all modules changed")
        with_hook = ModuleState(Net())
        assert with_hook.changed() == ""
    finally:
        handle.remove()
    assert state.changed() == ""
    assert with_hook.changed().endswith("hooks of all modules changed")


def test_a_hook_that_was_there_and_is_removed_is_named():
    net = Net()
    handle = net.layers[0].register_forward_hook(lambda *arguments: None)
    state = ModuleState.of(net)
    handle.remove()
    assert state.changed() == "the forward hooks of layers.0 changed"


def test_what_was_put_back_is_unchanged():
    net = Net()
    state, linear = ModuleState.of(net), net.layers[1].linear
    net.layers[1].linear = nn.Linear(4, 4)
    net.layers[0].scale = 2.0
    net.layers[0].register_forward_hook(_double).remove()
    assert state.changed()
    net.layers[1].linear, net.layers[0].scale = linear, 0.5
    assert state.changed() == "" and ModuleState.of(net) is state


def test_other_parameters_and_values_are_no_change():
    net = Net()
    state = ModuleState.of(net)
    net.layers[0].linear.weight = nn.Parameter(torch.ones(4, 4))
    net.load_state_dict(Net().state_dict())
    assert state.changed() == ""


def test_the_modules_of_a_closure_and_of_a_method_are_watched():
    net = Net()

    def call(x):
        return net(x)

    states = [ModuleState.of(call), ModuleState.of(net.forward)]
    net.layers[0].scale = 3
    assert [state.changed() for state in states] == [
        "net.layers.0.scale is 3, was 0.5",
        "layers.0.scale is 3, was 0.5",
    ]
    assert ModuleState.of(torch.tanh).changed() == ""


def test_versions_see_each_change_and_nothing_else():
    assert has_versions()  # of the Pythons that the tests run on
    first, second = {"a": 1}, {}
    versions = DictVersions([first, second])
    assert versions.are_same()
    second["b"] = 1
    assert not versions.are_same()
    versions.update()
    assert versions.are_same() and first["a"]
    first["a"] = 2
    assert not versions.are_same()
    assert DictVersions([]).are_same()


@pytest.fixture(scope="module", params=slow_but((StoredInductor,), (StoredInductor, StoredAoti)))
def load(request, tmp_path_factory):
    """Loads a graph of a `Net` from a store that has it."""
    store = ArtifactStore(tmp_path_factory.mktemp("changes") / "store")
    inputs = (torch.ones(2, 4),)
    with torch.no_grad():
        capture(Net().eval(), inputs, backend=request.param(store))

    def loaded(net):
        graph = capture(net.eval(), inputs, backend=request.param(store))
        assert graph.is_loaded
        return graph

    return loaded


@every_change
def test_a_loaded_graph_is_stale_after_a_change(load, change, message):
    net = Net()
    graph, x = load(net), torch.ones(2, 4)
    torch.testing.assert_close(graph.run(x), net(x))
    change(net.layers)
    with pytest.raises(StaleGraph, match=message):
        graph.run(x)


def test_a_loaded_graph_is_stale_under_a_hook_of_all_modules(load):
    net = Net()
    graph, x = load(net), torch.ones(2, 4)
    handle = register_module_forward_hook(lambda module, args, output: output * 2)
    try:
        with pytest.raises(StaleGraph, match="forward hooks of all modules changed"):
            graph.run(x)
    finally:
        handle.remove()
    torch.testing.assert_close(graph.run(x), net(x))


def test_a_loaded_graph_reads_a_replaced_parameter_or_is_stale(load):
    net = Net()
    graph, x = load(net), torch.ones(2, 4)
    net.layers[0].linear.weight = nn.Parameter(torch.ones(4, 4))
    torch.testing.assert_close(graph.run(x), net(x))
    net.layers[0].linear.bias = None
    with pytest.raises(StaleGraph, match=r"layers\.0\.linear\.bias"):
        graph.run(x)
