"""Whatever a graph depends on is in its key."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from graphs import WarmupManager, explicit
from graphs.store import environment_factors, graph_factors, key_of
from graphs.store.values import digest_of_globals

SOURCE = """
import torch
from torch import nn
{lazy}
FACTOR = 3

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = 0.5
        self.table = {{"a": [1, 2]}}

    def forward(self, x):
        from my_store_helper import helper
        return helper(self.linear(x)) * self.scale * FACTOR
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Imports the module again from its files, as a new process would."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_store_net.py").write_text(SOURCE.format(lazy=""))
    (tmp_path / "my_store_helper.py").write_text("def helper(x):\n    return x + 1\n")

    def load(name="", text=""):
        if name:
            path = tmp_path / f"{name}.py"
            path.write_text(path.read_text() + text)
        for module in ("my_store_net", "my_store_helper"):
            sys.modules.pop(module, None)
        import my_store_helper  # noqa: F401
        import my_store_net

        return my_store_net.Net()

    yield load
    for module in ("my_store_net", "my_store_helper"):
        sys.modules.pop(module, None)


def key(function, *inputs, backend="inductor", **options):
    with torch.no_grad():
        return key_of(graph_factors(function, inputs, backend=backend, options=options))


X = torch.ones(2, 4)


def test_the_same_module_has_the_same_key_in_each_process(load):
    net = load()
    assert key(net, X) == key(load(), X)


@pytest.mark.parametrize("name", ["my_store_net", "my_store_helper"])
def test_the_source_of_the_module_and_of_what_it_calls_counts(load, name):
    before = key(load(), X)
    assert key(load(name, "\n\ndef more():\n    pass\n"), X) != before


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


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("\nNet.kind = 1\n", lambda module: setattr(module.Net, "kind", 2)),
        ("\nTABLE = {'a': [1]}\n", lambda module: module.TABLE["a"].append(2)),
    ],
    ids=["class attribute", "global container"],
)
def test_what_a_program_sets_at_its_start_counts(load, text, change):
    net = load("my_store_net", text)
    before = key(net, X)
    change(sys.modules["my_store_net"])
    assert key(net, X) != before


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
    ],
    ids=["defaults", "function", "class", "object", "builtin"],
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


def test_code_that_was_edited_after_its_import_counts_as_it_was_loaded(load, tmp_path):
    net = load()
    (tmp_path / "my_store_helper.py").write_text("def helper(x):\n    return x + 22\n")
    edited = key(net, X)
    assert key(load(), X) != edited


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


def test_a_pass_whose_effect_is_unknown_means_no_key():
    with torch._inductor.config.patch(post_grad_custom_pre_pass=lambda graph: None):
        assert graph_factors(torch.relu, [X], backend="inductor", options={}) is None


def test_versions_and_the_processor_count(monkeypatch):
    before = key_of(environment_factors())
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert key_of(environment_factors()) != before
    monkeypatch.undo()
    assert key_of(environment_factors()) == before
    monkeypatch.setattr("graphs.store.factors._cpu", lambda: "another processor")
    assert key_of(environment_factors()) != before


def test_an_option_whose_effect_is_unknown_means_no_key():
    assert graph_factors(torch.relu, [X], backend="inductor", options={"pass": object()}) is None


def test_an_environment_is_the_same_in_another_process():
    code = "from graphs.store import *; print(key_of(environment_factors()))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == key_of(environment_factors())
