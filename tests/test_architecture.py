"""The house stays as drawn: floors, no circles, small files, names that say what a thing is."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
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


def _imports(body: list[ast.stmt]) -> Iterator[str]:
    """Modules of ours that are imported when a module is: not in functions, not for types."""
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


def test_the_ground_floor_knows_nothing_of_attention():
    assert not {name: found for name, found in IMPORTS.items() if name.startswith("graphs")
                for each in found if each.startswith("compiled_attn")}  # fmt: skip


def test_no_module_imports_itself_by_way_of_others():
    state: dict[str, bool] = {}  # False while a module is being looked at

    def visit(name: str, way: tuple[str, ...]) -> None:
        if state.get(name) is False:
            pytest.fail(" -> ".join([*way[way.index(name) :], name]))
        if name in state:
            return
        state[name] = False
        for each in sorted(IMPORTS[name]):
            visit(each, (*way, name))
        state[name] = True

    for name in IMPORTS:
        visit(name, ())


def test_a_file_can_be_read_in_five_minutes():
    sizes = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert not {name: size for name, size in sizes.items() if size > 400}


def test_a_module_begins_with_what_it_is():
    begun = {name: (ast.get_docstring(ast.parse(path.read_text())) or "").split(" ")[0]
             for name, path in MODULES.items()}  # fmt: skip
    asking = {"", "What", "Which", "Whether", "Where", "Why", "How", "Who", "Says", "Gives"}
    assert not {name: word for name, word in begun.items() if word in asking}


def test_only_what_is_installed_with_an_extra_is_imported_late():
    """The cores need torch and numpy alone."""
    allowed = {"torch", "numpy", "graphs", "compiled_attn", *sys.stdlib_module_names}
    extras = ("compiled_attn.cli", "compiled_attn.hf", "compiled_attn.engine", "graphs.cli",
              "graphs.report", "graphs.store", "compiled_attn.models", "compiled_attn.serve",
              "compiled_attn.workloads", "compiled_attn.ops.triton", "compiled_attn.ranks",
               "compiled_attn.replicas", "graphs.backends.onnx", "compiled_attn.integrations",
              "compiled_attn.pytest_plugin", "graphs.__main__")  # fmt: skip
    found = {
        name: {each.split(".")[0] for each in _imports(ast.parse(path.read_text()).body)} - allowed
        for name, path in MODULES.items()
        if not name.startswith(extras)
    }
    assert not {name: each for name, each in found.items() if each}


# Folder, modules without a test file that names or imports them, and what their tests are.
_THROUGH_OTHERS = (
    ("graphs", "files lazy", "by the store and by the names of the packages"),
    ("graphs.backends", "eager", "the reference that every capture is compared with"),
    ("graphs.backends.onnx", "export", "test_onnxrt"),
    ("graphs.capture", "export_state", "captures of aoti and of a store"),
    ("graphs.torch_internals", "artifacts settings", "test_inductor of the store, test_factors"),
    (
        "graphs.torch_internals",
        "checks compiling dispatch errors events tracing",
        "test_features, and the captures, watches and explanations that use them",
    ),
    ("graphs.torch_internals.replay", "calls", "the player of compiled_attn, and a double"),
    ("graphs.cli", "explain plan", "commands are run whole: test_app"),
    ("graphs.planner", "bound choose first_fit fit", "steps of `plan`, beside brute force"),
    ("graphs.report", "drawing", "test_charts"),
    ("compiled_attn.attention", "by_parts module", "test_unified, test_features"),
    ("compiled_attn.cache.blocks", "allocator stats table", "the pool: test_pool_stateful"),
    ("compiled_attn.cache.defrag", "holders lists report rows", "test_defragmenter, test_stateful"),
    ("compiled_attn.cli", "demand facts replicas table", "commands are run whole"),
    ("compiled_attn.compat.flash", "call page_table reference", "the known signatures: test_api"),
    ("compiled_attn.compat.paged", "block_tables call products reference scales", "test_attention"),
    ("compiled_attn.engine", "grammar handle report", "test_engine, test_constraint"),
    ("compiled_attn.hf", "recorder refused", "test_proof, test_families"),
    ("compiled_attn.integrations", "versions", "the integrations, each of a version"),
    ("compiled_attn.integrations.plans", "base gaudi sglang vllm", "test_formats"),
    ("compiled_attn.ops", "call checks timing", "every implementation of the op"),
    ("compiled_attn.ops.triton", "attend codes locate merge varlen_calls write", "test_launch"),
    (
        "compiled_attn.ranks",
        "agree context ending executor group shard turns",
        "ranks as processes",
    ),
    ("compiled_attn.replicas", "app deployment figures front server", "replicas as processes"),
    (
        "compiled_attn.serve",
        "app context endpoint http_errors parse request_parts requests responses",
        "called over HTTP",
    ),
    ("compiled_attn.step", "form", "its two forms"),
    ("compiled_attn.workloads", "arrival prompts synthetic", "test_simulate, test_default_demand"),
    ("compiled_attn.workloads.simulated", "engine pool", "test_simulate"),
)


def _has_tests_of_its_own(name: str, path: Path) -> bool:
    """Whether tests of the mirrored folder are named after a module, or import it."""
    folder = ROOT / "tests" / path.relative_to(ROOT).parent
    own = [*folder.glob(f"test_{path.stem}.py"), *folder.glob(f"test_{path.stem}_*.py")]
    texts = (test.read_text() for test in folder.glob("test_*.py"))
    return bool(own) or (folder / path.stem).is_dir() or any(name in text for text in texts)


def test_tests_mirror_the_modules():
    without = {
        name
        for name, path in MODULES.items()
        if not path.stem.startswith("__")
        and any(isinstance(each, ast.FunctionDef) for each in ast.walk(ast.parse(path.read_text())))
        and not _has_tests_of_its_own(name, path)
    }
    listed = {f"{folder}.{each}" for folder, names, _ in _THROUGH_OTHERS for each in names.split()}
    assert without == listed
