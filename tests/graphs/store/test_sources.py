"""The key depends on the source files that a graph can use, and on the versions of packages."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from graphs import WarmupManager, explicit
from graphs.store import graph_factors, key_of, modules, sources
from graphs.store.imports import imports_in

X = torch.ones(2, 4)
NET = """
import torch
from torch import nn
from graphs import WarmupManager, capture, explicit, progress_for
import my_used

class Net(nn.Module):
    def forward(self, x):
        from my_lazy import shift
        return shift(my_used.scale(x))
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
    folders = [*modules._installed_folders(), str(folder)]
    monkeypatch.setattr(modules, "_installed_folders", lambda: folders)
    return folder


@pytest.fixture
def own(tmp_path, monkeypatch):
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "my_net.py").write_text(NET)
    (folder / "my_lazy.py").write_text("def shift(x):\n    return x + 1\n")
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def key(own, site):
    """Returns the key and sources of the net as a new process would compute them."""
    install(site, "my_used", "1.0", "def scale(x):\n    return x * 2\n")

    def key():
        forget()
        net = importlib.import_module("my_net").Net()
        with torch.no_grad():
            found = graph_factors(net, [X], backend="inductor", options={})
        return key_of(found), found["sources"]

    yield key
    forget()


def forget():
    for name in ("my_net", "my_used", "my_lazy", "my_unrelated"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    modules.version_of.cache_clear()
    modules._distributions.cache_clear()
    sources._reach.cache_clear()


def test_installing_a_package_that_no_file_names_keeps_the_key(key, site):
    before, found = key()
    for version in ("1.0", "2.0"):
        install(site, "my_unrelated", version)
        assert importlib.metadata.version("my_unrelated") == version
        assert key()[0] == before
    assert set(found) == {"graphs", "my_lazy", "my_net", "my_used", "torch"}


@pytest.mark.parametrize(
    ("is_installed", "name", "counts"),
    [(True, "my_apply", False), (True, "extra_repr", True), (False, "my_apply", True)],
    ids=["added by a package", "replaced by a package", "added by own code"],
)
def test_methods_put_into_a_class_of_torch(key, site, own, monkeypatch, is_installed, name, counts):
    text = "def method(self):\n    return ''\n"
    if is_installed:
        install(site, "my_unrelated", "1.0", text)
    else:
        (own / "my_unrelated.py").write_text(text)
    method = importlib.import_module("my_unrelated").method
    monkeypatch.setattr(nn.Module, name, method, raising=False)
    assert ("my_unrelated" in key()[1]) == counts


def test_another_version_of_a_package_that_the_graph_uses_is_another_key(key, site):
    before, _ = key()
    install(site, "my_used", "1.1", "def scale(x):\n    return x * 3\n")
    assert key()[0] != before


def test_a_file_that_is_imported_inside_a_function_counts_before_it_is_imported(key, own):
    before, _ = key()
    assert "my_lazy" not in sys.modules
    (own / "my_lazy.py").write_text("def shift(x):\n    return x + 2\n")
    assert key()[0] != before


def test_a_file_in_a_namespace_counts_before_it_is_imported(key, own):
    (own / "my_space" / "deep").mkdir(parents=True)
    helper = own / "my_space" / "deep" / "helper.py"
    (own / "my_lazy.py").write_text("def shift(x):\n    from my_space.deep.helper import f\n")
    found = set()
    for text in ("def f(x):\n    return x + 1\n", "def f(x):\n    return x + 22\n"):
        helper.write_text(text)
        found.add(key()[1]["my_space.deep.helper"])
    assert len(found) == 2


def test_a_package_that_is_distributed_under_another_name_counts_by_its_version(key, site):
    """As yaml, which is distributed as PyYAML; whether it was imported yet does not matter."""
    for info in site.glob("*.dist-info"):
        text = "Metadata-Version: 2.1\nName: py-my-used\nVersion: 7.0\n"
        (info / "METADATA").write_text(text)
        (info / "top_level.txt").write_text("my_used\n")
        info.rename(site / "py_my_used-7.0.dist-info")
    assert key()[1]["my_used"] == "py-my-used 7.0"


def test_a_plain_module_depends_on_torch_and_on_this_package():
    net = nn.Sequential(nn.Linear(4, 4))
    net.manager = WarmupManager(net, explicit(["rows"], [(2,)]), lambda _: [X], backend="eager")
    with torch.no_grad():
        found = graph_factors(net, [X], backend="inductor", options={})["sources"]
    assert set(found) == {"torch", "graphs"}


def test_a_change_of_any_file_of_this_package_is_another_key(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "__file__", str(tmp_path / "graphs" / "store" / "sources.py"))
    (tmp_path / "graphs" / "backends").mkdir(parents=True)
    file = Path(tmp_path, "graphs", "backends", "inductor.py")
    digests = set()
    for text, started in (("", 0), ("one", 0), ("two", 0), ("two", sys.maxsize)):
        file.write_text(text)
        monkeypatch.setattr(sources, "_STARTED", started)  # edited since, or not
        sources._own_digest.cache_clear()
        digests.add(sources._own_digest())
    sources._own_digest.cache_clear()
    assert len(digests) == 4


def test_only_a_file_that_was_edited_after_the_import_has_another_key(own, monkeypatch):
    monkeypatch.setattr(sources, "_STARTED", 0)  # as if it was written just before the start
    module = importlib.import_module("my_lazy")
    file = Path(module.__file__)
    assert sources._if_edited("my_lazy", file, 1) == ""
    file.write_text("def shift(x):\n    return x + 2\n")
    edited = sources._if_edited("my_lazy", file, 1)
    file.write_text("def shift(x:\n")
    assert edited == sources._if_edited("my_lazy", file, 1) != ""
    monkeypatch.delitem(sys.modules, "my_lazy")


def test_relative_imports_of_a_package_that_is_run_as_main_count(own, monkeypatch):
    (own / "my_pack").mkdir()
    for name in ("__init__", "helper"):
        (own / "my_pack" / f"{name}.py").write_text("")
    main = ModuleType("__main__")
    main.__file__, main.__package__ = str(own / "my_pack" / "run.py"), "my_pack"
    Path(main.__file__).write_text("from .helper import scale\n")
    monkeypatch.setitem(sys.modules, "__main__", main)
    files, _ = sources._reachable(frozenset(["__main__"]))
    assert {"__main__", "my_pack", "my_pack.helper"} <= files.keys()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import a, b.c as d", {"a.*", "b.*", "b.c.*"}),
        ("from a import b as c, d", {"a", "a.b.*", "a.d.*"}),
        ("from a import *", {"a.*"}),
        ("    from a import b  # why, not c\n", {"a", "a.b.*"}),
        ("try: import a; import b\nexcept ImportError: pass", {"a.*", "b.*"}),
        ("from a import (  # b)\n    c,\n    d,\n)", {"a", "a.c.*", "a.d.*"}),
        ("from a \\\n import b, \\\n c", {"a", "a.b.*", "a.c.*"}),
        ("from . import a", {"pack.sub", "pack.sub.a.*"}),
        ("from .a import b", {"pack.sub.a", "pack.sub.a.b.*"}),
        ("from ..a import b", {"pack.a", "pack.a.b.*"}),
        ("from .import a", {"pack.sub", "pack.sub.a.*"}),
        ("# a lazy import (see below\nfrom a import b\nx = c()", {"see.*", "a", "a.b.*"}),
    ],
)
def test_imports_are_found_by_their_full_names(text, found):
    assert found == set(imports_in(text.encode(), "pack.sub").run)


@pytest.mark.parametrize(
    ("text", "run", "for_types"),
    [
        ("if TYPE_CHECKING:\n    import a\nelse:\n    import b\n", {"b.*"}, {"a": ("a.*",)}),
        ("if typing.TYPE_CHECKING:  # why\n    from .a import b\n\n    import c as d\nimport e",
         {"e.*"}, {"b": ("pack.sub.a", "pack.sub.a.b.*"), "d": ("c.*",)}),
        ("def f():\n    if TYPE_CHECKING:\n        from a import (\n            b as c,\n"
         "        )\n    import d\n", {"d.*"}, {"c": ("a", "a.b.*")}),
        ("if TYPE_CHECKING:\n    from a import b", set(), {"b": ("a", "a.b.*")}),
        ("if TYPE_CHECKING or a:\n    import b\n", {"b.*"}, {}),
        ("if not TYPE_CHECKING:\n    import b\n", {"b.*"}, {}),
        ("if TYPE_CHECKING: import a\nimport b\n", {"a.*", "b.*"}, {}),
    ],
)  # fmt: skip
def test_imports_for_type_checkers_stand_by_themselves(text, run, for_types):
    found = imports_in(text.encode(), "pack.sub")
    assert (set(found.run), found.for_types) == (run, for_types)


LAZY = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from my_pack.deep import shift
    from my_pack.other import unused as other
"""


@pytest.mark.parametrize(
    ("text", "reached"),
    [
        ("from my_pack import shift", {"deep"}),
        ("from my_pack import other", {"other"}),
        ("from my_pack import *", {"deep", "other"}),
        ("import my_pack", {"deep", "other"}),
        ("from my_pack.sub import name", set()),
        ("from my_again import shift", {"deep"}),
    ],
)
def test_a_package_that_imports_on_first_access_reaches_what_its_names_come_from(
    own, text, reached
):
    (own / "my_pack").mkdir()
    files = {
        "__init__": LAZY,
        "deep": "def shift(x): ...",
        "other": "unused = 1",
        "sub": "name = 1",
    }
    for name, inside in files.items():
        (own / "my_pack" / f"{name}.py").write_text(inside)
    (own / "my_again.py").write_text("if TYPE_CHECKING:\n    from my_pack import shift\n")
    (own / "my_lazy.py").write_text(text)
    forget()
    files, _ = sources._reachable(frozenset(["my_lazy"]))
    assert files.keys() & {"my_pack.deep", "my_pack.other"} == {f"my_pack.{n}" for n in reached}


@pytest.mark.parametrize("text", ["print 'two'", "x = " + "(" * 5000, "\xff\x00 import .. , (", ""])
def test_any_text_can_be_searched_for_imports(text):
    list(imports_in(text.encode("latin-1"), "pack"))
