"""Which imports of a file its live code can use."""

from __future__ import annotations

import pytest

from graphs.store.imports import SourceFile, live_imports, read_source

HEAD = "from __future__ import annotations\nimport torch\n"
NET = "class Net:\n    def forward(self, x):\n        return x\n"


@pytest.fixture
def read(tmp_path):
    def read(text, name="net"):
        file = tmp_path / f"{name}.py"
        file.write_text(text)
        found = file.stat()
        return read_source(name, str(file), found.st_mtime_ns, found.st_size)

    return read


def live(files, *entries):
    if isinstance(files, SourceFile):
        files = {"net": files}
    found = live_imports(files, entries or [("net", "Net")])
    return {target for each in found for target in each.targets}


EXPORT = "def export(net):\n    import onnx\n    onnx.save(net)\n"
UNUSED = {
    "in a function that nobody mentions": EXPORT + NET,
    "in a class that nobody mentions": "class Writer:\n    def go(self):\n        import onnx\n"
    + NET,
    "only in __all__": "__all__ = ['export']\n" + EXPORT + NET,
    "in the script's own part": EXPORT + NET + "if __name__ == '__main__':\n    export(Net())\n",
    "imported there": NET + "if __name__ == '__main__':\n    import onnx\n    onnx.save(1)\n",
    "for types alone": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import onnx\n"
        "def save(x: onnx.Model): ...\n" + NET
    ),
    "tried, for a function that nobody mentions": (
        "try:\n    import onnx\nexcept ImportError:\n    onnx = None\n"
        "def export(net):\n    onnx.save(net)\n" + NET
    ),
}
USED = {
    "at the top": "import onnx\n" + NET,
    "at the top, and mentioned by nobody": "from onnx import helper\n" + NET,
    "by forward": "class Net:\n    def forward(self, x):\n        import onnx\n",
    "by another method": NET + "    def other(self):\n        import onnx\n",
    "by what forward calls": EXPORT + NET.replace("return x", "return export(x)"),
    "by what forward calls by a text": EXPORT
    + NET.replace("return x", "return globals()['export'](x)"),
    "by a function of a function": EXPORT
    + "def outer(x):\n    return export(x)\n"
    + NET.replace("return x", "return outer(x)"),
    "on import": EXPORT + "export(3)\n" + NET,
    "in a condition on import": EXPORT + "if torch.cuda:\n    export(3)\n" + NET,
    "by a decorator": EXPORT + "@export\n" + NET,
    "by a base class": EXPORT.replace("def export(net)", "class export")
    + NET.replace("class Net", "class Net(export)"),
    "by a default": EXPORT + "def other(x=export(1)): ...\n" + NET,
    "by what may be registered": "@torch.library.custom_op('a::b')\n" + EXPORT + NET,
    "tried, and mentioned by forward": (
        "try:\n    import onnx\nexcept (ImportError, OSError):\n    onnx = None\n"
        + NET.replace("return x", "return x if onnx else 1")
    ),
    "tried, all of it": "try:\n    from onnx import *\nexcept ImportError:\n    pass\n" + NET,
    "tried, where something else fails": (
        "try:\n    import onnx\nexcept ValueError:\n    pass\n" + NET
    ),
    "in a with statement": "with torch.no_grad():\n    import onnx\n" + NET,
    "in a match": "match 1:\n    case 1:\n        import onnx\n" + NET,
}


@pytest.mark.parametrize("how", UNUSED)
def test_a_package_that_no_live_code_can_use_does_not_count(read, how):
    assert not [name for name in live(read(HEAD + UNUSED[how])) if name.startswith("onnx")]


@pytest.mark.parametrize("how", USED)
def test_a_package_that_live_code_can_use_counts(read, how):
    assert "onnx" in live(read(HEAD + USED[how]))


def test_what_is_live_is_so_across_files(read):
    files = {
        "net": read("from tools import export\n" + NET.replace("return x", "return export(x)")),
        "tools": read(EXPORT, "tools"),
    }
    assert "onnx" in live(files)
    files["net"] = read("from tools import export\n" + NET + "\n")
    assert "onnx" not in live(files)


def test_relative_imports_are_told_by_their_full_names(tmp_path):
    file = tmp_path / "module.py"
    file.write_text("from . import a\nfrom .b import c\nfrom ..d import e\nimport f.g as h\n")
    source = read_source("pack.sub.module", str(file), 0, 0)
    assert [each.targets for each in source.imports] == [
        ("pack.sub", "pack.sub.a"),
        ("pack.sub.b", "pack.sub.b.c"),
        ("pack.d", "pack.d.e"),
        ("f.g",),
    ]
    assert source.imports[3].bound == {"h"}


def test_a_file_of_another_python_has_no_imports(read):
    assert read("print 'two'\nimport onnx\n").imports == []
    assert read("x = " + "(" * 5000 + ")" * 5000).imports == []
