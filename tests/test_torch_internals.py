"""Private parts of torch are named in one room, `graphs/torch_internals`, and nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOM = ROOT / "graphs" / "torch_internals"
SOURCES = [
    path
    for package in ("graphs", "compiled_attn")
    for path in sorted((ROOT / package).rglob("*.py"))
    if ROOM not in path.parents
]

# Extension points that torch documents, in spite of their names.
ALLOWED = (
    "torch._assert_async",
    "torch._check",
    "torch._inductor.custom_graph_pass",
    "torch.ops.",  # operators
    "torch.utils._python_dispatch",
    "torch.utils._pytree",
)


def private_names(tree: ast.AST) -> Iterator[str]:
    """Each private name of torch that a module reads, imports, patches or names in a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Attribute):
            yield dotted(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value if not set(node.value) & set(" \n") else ""


def dotted(node: ast.AST) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([*([node.id] if isinstance(node, ast.Name) else ["?"]), *reversed(parts)])


def is_private(name: str) -> bool:
    parts = name.split(".")
    hidden = any(part.startswith("_") and not part.startswith("__") for part in parts[1:])
    return parts[0] == "torch" and hidden and not name.startswith(ALLOWED)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_private_part_of_torch_outside_its_room(path):
    tree = ast.parse(path.read_text("utf-8"))
    assert sorted({name for name in private_names(tree) if is_private(name)}) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch._inductor import config",
        "torch._C._something()",
        "importlib.import_module('torch._inductor.codecache')",
        "torch.fx._config.patch()",
    ],
)
def test_the_search_finds_each_way_to_name_a_private_part(source):
    assert any(is_private(name) for name in private_names(ast.parse(source)))
