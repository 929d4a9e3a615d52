"""The key holds the sources of what a graph can use, and of nothing else."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import sys

import pytest
import torch
from torch import nn

import graphs.store.sources
from graphs import CapturedGraph, CompileWatch, WarmupManager, explicit
from graphs.store import ArtifactStore, StoredInductor, graph_factors, key_of
from graphs.store.imports import file_of
from graphs.store.sources import MAKERS
from graphs.store.values import MACHINERY, is_machinery
from graphs.warmup.capturing import Capturing
from graphs.warmup.journal import Journal

X = torch.ones(2, 4)
NET = """
import torch
from torch import nn
from graphs import WarmupManager, capture, explicit, progress_for
from graphs.warmup.progress import LiveProgress
import my_used

def export(net):
    import my_unrelated
    return my_unrelated.save(net)

class Net(nn.Module):
    def forward(self, x):
        return my_used.scale(x)
"""


def install(folder, name, version, text=""):
    """A package as an installer leaves it, in a folder that is on the path."""
    package = folder / name
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text(f"__version__ = {version!r}\n" + text)
    for old in folder.glob(f"{name}-*.dist-info"):
        (old / "METADATA").unlink()
        old.rmdir()
    (folder / f"{name}-{version}.dist-info").mkdir()
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(text)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of installed packages, as `site-packages` is."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    is_own = graphs.store.sources.is_own
    monkeypatch.setattr(
        "graphs.store.sources.is_own",
        lambda name: is_own(name) and not name.startswith(("my_used", "my_unrelated")),
    )
    return folder


@pytest.fixture
def key(tmp_path, site, monkeypatch):
    """The key of the net in a new process, as far as a process goes."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "my_net.py").write_text(NET)
    monkeypatch.syspath_prepend(str(tmp_path / "own"))
    install(site, "my_used", "1.0", "def scale(x):\n    return x * 2\n")

    def key(backend="inductor"):
        forget()
        net = importlib.import_module("my_net").Net()
        with torch.no_grad():
            found = graph_factors(net, [X], backend=backend, options={})
        return key_of(found), found["sources"]

    yield key
    forget()


def forget():
    for name in ("my_net", "my_used", "my_unrelated"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    graphs.store.sources.version_of.cache_clear()
    graphs.store.sources._distributions.cache_clear()


def test_installing_a_package_that_the_graph_does_not_use_keeps_the_key(key, site):
    before, sources = key()
    install(site, "my_unrelated", "1.0", "def save(net):\n    pass\n")
    assert importlib.metadata.version("my_unrelated") == "1.0"
    assert key()[0] == before
    install(site, "my_unrelated", "2.0", "def save(net):\n    pass\n")
    assert key()[0] == before
    assert "my_used" in sources and "my_unrelated" not in sources


def test_another_version_of_a_package_that_the_graph_uses_is_another_key(key, site):
    before, _ = key()
    install(site, "my_used", "1.1", "def scale(x):\n    return x * 3\n")
    assert key()[0] != before


def test_a_package_that_is_distributed_by_another_name_counts_by_its_version(key, site):
    """As yaml, which is distributed as PyYAML; whether it was imported yet does not matter."""
    for info in site.glob("*.dist-info"):
        text = "Metadata-Version: 2.1\nName: py-my-used\nVersion: 7.0\n"
        (info / "METADATA").write_text(text)
        (info / "top_level.txt").write_text("my_used\n")
        info.rename(site / "py_my_used-7.0.dist-info")
    assert key()[1]["my_used"] == "py-my-used 7.0"


@pytest.mark.parametrize("backend", ["inductor", "aoti"])
def test_what_serves_graphs_but_makes_none_does_not_count(key, backend):
    """onnx, onnxruntime and rich are packages that other backends and the commands import."""
    _, sources = key(backend)
    assert {name for name in sources if not name.startswith("graphs.")} == {
        "my_net",
        "my_used",
        "torch",
    }
    assert {name for name in sources if name.startswith("graphs.")} == set(MAKERS[backend])


def test_a_plain_module_depends_on_torch_and_on_what_makes_its_artifact():
    net = nn.Sequential(nn.Linear(4, 4))
    net.manager = WarmupManager(net, explicit(["rows"], [(2,)]), lambda _: [X], backend="eager")
    with torch.no_grad():
        sources = graph_factors(net, [X], backend="inductor", options={})["sources"]
    assert set(sources) == {"torch", *MAKERS["inductor"]}


@pytest.mark.parametrize("backend", MAKERS)
def test_a_change_of_what_makes_an_artifact_is_another_key(backend, monkeypatch):
    def key():
        with torch.no_grad():
            return key_of(graph_factors(nn.GELU(), [X], backend=backend, options={}))

    before, digest = key(), graphs.store.sources._digest
    for name in MAKERS[backend]:
        changed = file_of(name)
        monkeypatch.setattr(
            graphs.store.sources,
            "_digest",
            lambda file, changed=changed: "changed" if file == changed else digest(file),
        )
        assert key() != before


# What a module named in a string has to hold, so that the name cannot outlive a move.
_HELD = {
    "graphs.backends.aoti": "build",
    "graphs.backends.inductor": "freeze",
    "graphs.capture.export_state": "State",
    "graphs.capture.inputs": "DistinctInputs",
    "graphs.capture.wrappers": "with_own_code",
    "graphs.store.inductor": "StoredInductor",
    "graphs.torch_internals.artifacts": "read",
    "graphs.torch_internals.compiling": "compile_once",
    "graphs.torch_internals.example_inputs": "separated",
    "graphs.torch_internals.exporting": "exported",
    "graphs.torch_internals.kernel_units": "shared_units",
    "graphs.torch_internals.regions": "Region",
    "graphs.torch_internals.vectors": "trusted_vectors",
}


def test_every_maker_is_a_module_with_what_it_is_a_maker_for():
    assert _HELD.keys() == {name for names in MAKERS.values() for name in names}
    for name, held in _HELD.items():
        assert getattr(importlib.import_module(name), held).__module__ == name


@pytest.mark.parametrize("package", MACHINERY)
def test_the_machinery_is_packages(package):
    assert importlib.import_module(package).__path__


@pytest.mark.parametrize(
    "kind",
    [ArtifactStore, CapturedGraph, Capturing, CompileWatch, Journal, StoredInductor, WarmupManager],
)
def test_what_captures_watches_and_serves_is_machinery(kind):
    assert is_machinery(kind.__module__)


def test_what_a_graph_may_be_made_of_is_no_machinery():
    assert not is_machinery("graphs.buckets.space") and not is_machinery("compiled_attn.models.hf")


# What the makers import, and no artifact depends on: bookkeeping, messages, what runs graphs.
_ASIDE = {
    "graphs.capture.contract",
    "graphs.capture.input_overlaps",
    "graphs.capture.module_state",
    "graphs.capture.symbolic",
    "graphs.errors",
    "graphs.store.store",
    "graphs.store.stored",
    "graphs.torch_internals.checks",
    "graphs.torch_internals.direct_call",
    "graphs.torch_internals.errors",
    "graphs.torch_internals.features",
    "graphs.torch_internals.patches",
    "graphs.torch_internals.replay.replay",
    "graphs.torch_internals.settings",
    "graphs.watch.causes",
}


@pytest.mark.parametrize("backend", MAKERS)
def test_every_import_of_a_maker_is_a_maker_or_known_to_be_none(backend):
    for name in MAKERS[backend]:
        tree = ast.parse(file_of(name).read_bytes())
        imported = {
            node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("graphs")
        }
        unknown = imported - set(MAKERS[backend]) - _ASIDE
        # An aoti package asks inductor whether there is a compiler; its artifacts share a file.
        of_inductor = {*MAKERS["inductor"]} if backend == "aoti" else set()
        assert unknown <= of_inductor
