"""Layers, import cycles, file sizes, and imports that need an extra."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(
    path for each in ("graphs", "compiled_attn") for path in (ROOT / each).rglob("*.py")
)


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module(path): path for path in SOURCES}


def _imports(body: Sequence[ast.AST]) -> Iterator[str]:
    """Our modules that these statements import: not in functions, not for types."""
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Try):
            yield from _imports([*node.body, *(s for each in node.handlers for s in each.body)])


IMPORTS = {
    name: {each for each in _imports(ast.parse(path.read_text()).body) if each in MODULES}
    for name, path in MODULES.items()
}


def test_graphs_imports_nothing_of_compiled_attn():
    assert not {name: found for name, found in IMPORTS.items() if name.startswith("graphs")
                for each in found if each.startswith("compiled_attn")}  # fmt: skip


def test_there_is_no_import_cycle():
    """Late and typed imports count too."""
    imports = {
        name: {*_imports([*ast.walk(ast.parse(path.read_text()))])} & {*MODULES}
        for name, path in MODULES.items()
    }
    state: dict[str, bool] = {}  # False while a module is being visited

    def visit(name: str, way: tuple[str, ...]) -> None:
        if state.get(name) is False:
            pytest.fail(" -> ".join([*way[way.index(name) :], name]))
        if name in state:
            return
        state[name] = False
        for each in sorted(imports[name] - {name}):
            visit(each, (*way, name))
        state[name] = True

    for name in imports:
        visit(name, ())


def test_no_file_has_more_than_400_lines():
    sizes = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert not {name: size for name, size in sizes.items() if size > 400}


def test_only_modules_of_extras_import_third_parties():
    """Everything else needs torch and numpy alone."""
    allowed = {"torch", "numpy", "graphs", "compiled_attn", *sys.stdlib_module_names}
    extras = ("compiled_attn.cli", "compiled_attn.engine", "graphs.cli",
              "graphs.report", "graphs.store", "compiled_attn.models", "compiled_attn.serve",
              "compiled_attn.planner", "compiled_attn.ops.triton", "compiled_attn.ranks",
              "graphs.backends.onnx", "compiled_attn.contrib",
              "graphs.backends.conformance.test_backend", "compiled_attn.pytest_plugin",
              "compiled_attn.testing.kit.command", "compiled_attn.testing.kit.test_op",
              "graphs.__main__")  # fmt: skip
    found = {
        name: {each.split(".")[0] for each in _imports(ast.parse(path.read_text()).body)} - allowed
        for name, path in MODULES.items()
        if not name.startswith(extras)
    }
    assert not {name: each for name, each in found.items() if each}
