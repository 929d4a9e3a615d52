"""Attributes, closures, hooks, classes and globals that a graph bakes in are in its key."""

from __future__ import annotations

import functools
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from graphs import WarmupManager, explicit
from graphs.lazy import lazy_names
from graphs.store.values import digest_of_globals
from tests.graphs.store.keys import X, key


@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net, "scale", 0.25),
        lambda net: net.table["a"].append(3),
        lambda net: setattr(sys.modules["my_store_net"], "FACTOR", 4),
        lambda net: net.double(),
        lambda net: net.register_buffer("more", torch.ones(1)),
        lambda net: net.eval(),
        lambda net: setattr(net, "linear", nn.Linear(4, 8)),
    ],
)
def test_attributes_globals_and_state_count(load, change):
    net = load()
    before = key(net, X)
    change(net)
    assert key(net, X) != before


def test_numbers_of_a_process_do_not_count(load):
    net = load()
    keys = set()
    for net.config_hash, net.addresses in ((1, [1]), (2, [2])):
        keys.add(key(net, X))
    assert len(keys) == 1


def test_what_serves_a_module_and_hangs_from_it_does_not_count(load):
    net = load()
    net.manager = WarmupManager(net, explicit(["rows"], [(2,)]), lambda _: [X], backend="eager")
    before = key(net, X)
    net.manager.warmup()
    assert key(net, X) == before


def test_every_set_counts():
    # Each is digested as a list that is gone afterwards, and whose address another may get.
    net = nn.Module()
    for number in range(20):
        setattr(net, f"choices_{number}", {number})
    keys = {key(net, X)}
    for number in range(20):
        setattr(net, f"choices_{number}", {number, "more"})
        keys.add(key(net, X))
    assert len(keys) == 21


def test_a_container_of_itself_and_the_environment_do_no_harm(load, monkeypatch):
    text = "\nfrom os import environ\nLOOP = []\nLOOP.append(LOOP)\n"
    before = key(load("my_store_net", text), X)
    monkeypatch.setenv("MY_STORE_VARIABLE", "another")
    assert key(load(), X) == before


def test_names_that_a_package_imports_on_first_access_count_only_if_they_are_replaced(monkeypatch):
    package, deep = ModuleType("my_lazy_pack"), ModuleType("my_lazy_pack.my_deep")
    deep.shift = functools.partial(scaled, factor=2)
    monkeypatch.setitem(sys.modules, "my_lazy_pack", package)
    monkeypatch.setitem(sys.modules, "my_lazy_pack.my_deep", deep)
    package.__getattr__, _ = lazy_names("my_lazy_pack", {"my_deep": "shift"})
    before = digest_of_globals(package)
    assert package.shift is deep.shift and "shift" in vars(package)
    assert digest_of_globals(package) == before
    package.shift = functools.partial(scaled, factor=3)
    assert digest_of_globals(package) != before


def test_a_large_global_container_is_data_and_does_not_count():
    module = ModuleType("my_session")
    digests = []
    for count in (2, 3, 2000, 3000):
        module.TABLE = [*range(count)]
        digests.append(digest_of_globals(module))
    assert digests[0] != digests[1] != digests[2] == digests[3]


class Slotted:
    __slots__ = ("factor",)

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor


def scaled(x, factor):
    return x * factor


def keyword(factor):
    def call(x, *, factor=factor):
        return x * factor

    return call


def closure(factor):
    return lambda x: x * factor


def wrapped(factor):
    return functools.wraps(scaled)(lambda x: x * factor)


@pytest.mark.parametrize(
    "make",
    [Slotted, lambda k: functools.partial(scaled, factor=k), keyword, closure, wrapped],
    ids=["slots", "partial", "keyword default", "closure", "wrapped"],
)
def test_values_count_wherever_a_callable_keeps_them(make):
    assert key(make(2), X) == key(make(2), X) != key(make(3), X)


def typed_in(text):
    """The function `f` of a session without a file."""
    names = {"__name__": "my_session"}
    exec(text, names)
    return names["f"]


@pytest.mark.parametrize(
    "text",
    [
        "def g(x):\n    return x + {}\n\ndef f(x):\n    return [g(y) for y in [x]][0]\n",
        "class F:\n    @staticmethod\n    def g(x):\n        return x + {}\n\nf = F().g\n",
        "N = {}\nclass F:\n    def __call__(self, x):\n        return x + N\n\nf = F()\n",
        "class N:\n    n = {}\nclass F:\n    def __call__(self):\n        return N.n\n\nf = F()\n",
    ],
    ids=["function", "static method", "global of a method", "another class"],
)
def test_what_was_typed_in_counts_with_what_it_calls(text):
    assert key(typed_in(text.format(1)), X) == key(typed_in(text.format(1)), X)
    assert key(typed_in(text.format(1)), X) != key(typed_in(text.format(2)), X)


class Part(nn.Module):
    def __init__(self, factor=1):
        super().__init__()
        self.factor = factor


def of(**attributes):
    net = nn.Module()
    net.a, net.b = Part(1), Part(2)
    for name, make in attributes.items():
        setattr(net, name, make(net))
    return net


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda net: [net.a, net.b], lambda net: [net.b, net.a]),
        (lambda net: {net.a}, lambda net: {net.b}),
        (lambda net: {net.a: 1, net.b: 2}, lambda net: {net.b: 1, net.a: 2}),
        (lambda net: {"a": 1, "b": 2}, lambda net: {"b": 2, "a": 1}),
    ],
    ids=["list", "set", "keys of a mapping", "order of a mapping"],
)
def test_which_of_several_objects_counts(one, other):
    assert key(of(order=one), X) == key(of(order=one), X)
    assert key(of(order=one), X) != key(of(order=other), X)


@pytest.mark.parametrize(("name", "is_other"), [("rapid", True), ("pid", False), ("my_pid", False)])
def test_only_whole_words_name_numbers_of_a_process(name, is_other):
    keys = {key(of(**{name: lambda _, value=value: value}), X) for value in (1, 2)}
    assert len(keys) == 1 + is_other


@pytest.mark.parametrize("name", ["_global_forward_hooks", "_global_forward_pre_hooks"])
def test_hooks_of_all_modules_count(name, monkeypatch):
    before = key(of(), X)
    monkeypatch.setitem(getattr(nn.modules.module, name), -1, lambda *_: None)
    assert key(of(), X) != before


def test_a_forward_of_another_module_counts(monkeypatch):
    net, before = Part(), key(Part(), X)
    for value in (
        lambda self, x: x * 2,
        lambda self, x: x * 3,
        functools.partial(scaled, factor=2),
    ):
        monkeypatch.setattr(Part, "forward", value, raising=False)
        assert key(net, X) != before
        before = key(net, X)


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("", lambda module: setattr(module.Net.__init__, "__defaults__", (2,))),
        ("", lambda module: setattr(module, "helper", scaled)),
        ("class C:\n    n = 1\n", lambda module: setattr(module.C, "n", 2)),
        ("class C:\n    pass\nCONFIG = C()\n", lambda module: setattr(module.CONFIG, "n", 2)),
        ("ACT = torch.relu\n", lambda module: setattr(module, "ACT", torch.tanh)),
        ("Net.kind = 1\n", lambda module: setattr(module.Net, "kind", 2)),
        ("TABLE = {'a': [1]}\n", lambda module: module.TABLE["a"].append(2)),
    ],
    ids=["defaults", "function", "class", "object", "builtin", "class attribute", "container"],
)
def test_other_globals_than_plain_values_count(load, text, change):
    net = load("my_store_net", "\n" + text)
    before = key(net, X)
    assert key(load(), X) == before
    net = load()
    change(sys.modules["my_store_net"])
    assert key(net, X) != before


def test_of_a_script_only_globals_that_its_functions_use_count(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text("")
    digests = []
    for scale, started in ((1, 1), (1, 2), (2, 2)):
        main = ModuleType("__main__")
        main.__file__ = str(script)
        exec(f"SCALE, STARTED = {scale}, {started}\ndef f(x):\n    return x * SCALE\n", vars(main))
        digests.append(digest_of_globals(main))
    assert digests[0] == digests[1] != digests[2]
