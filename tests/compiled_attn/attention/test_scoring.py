"""`Scoring` is made and read by the names of its fields, so that a new one moves none."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def _is_scoring(node: ast.AST) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
    return name == "scoring"


def _is_by_position(node: ast.AST) -> bool:
    match node:
        case ast.Assign(targets=[ast.Tuple() | ast.List()], value=value):
            return _is_scoring(value)
        case ast.Subscript(value=value) | ast.Starred(value=value):
            return _is_scoring(value)
        case ast.For(iter=each) | ast.comprehension(iter=each):
            return _is_scoring(each)
        case ast.Call(func=ast.Name("Scoring"), args=args):
            return len(args) > 1 or any(isinstance(each, ast.Starred) for each in args)
    return False


def by_position(source: str) -> list[int]:
    """Lines of code that go by the order of the fields."""
    found = [node for node in ast.walk(ast.parse(source)) if _is_by_position(node)]
    return [getattr(node, "lineno", 0) for node in found]


@pytest.mark.parametrize("folder", ["compiled_attn", "tests", "benchmarks", "examples"])
def test_scoring_is_made_and_read_by_name(folder):
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    found = {str(path.relative_to(ROOT)): by_position(path.read_text()) for path in paths}
    assert not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize(
    "line",
    [
        "scale, *_ = call.scoring",
        "scale = call.scoring[0]",
        "attend(*scoring)",
        "[each for each in scoring]",
        "Scoring(0.1, 4096)",
        "Scoring(*options)",
    ],
)
def test_what_goes_by_position_is_found(line):
    assert by_position(line)
