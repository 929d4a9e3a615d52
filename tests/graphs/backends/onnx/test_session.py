from __future__ import annotations

import pytest

from graphs.backends.onnx.session import may_alias

helper = pytest.importorskip("onnx.helper")


def graph(*nodes):
    """Nodes as ``"Op in in -> out"``."""
    made = []
    for node in nodes:
        left, output = node.split(" -> ")
        op, *inputs = left.split()
        made.append(helper.make_node(op, inputs, [output]))
    return helper.make_graph(made, "test", [], [])


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (["ScatterND old at rows -> new"], True),
        (["ScatterND old at rows -> new", "Gather new at -> y"], True),
        (["Gather old at -> r", "ScatterND old at r -> new"], True),
        (["Gather old at -> r", "ScatterND old at rows -> new"], False),
        (["ScatterND old at rows -> new", "Add old new -> y"], False),
        (["Reshape old s -> v", "ScatterND v at rows -> w", "Reshape w t -> new"], True),
        (["Reshape old s -> v", "Relu v -> y", "ScatterND old at rows -> new"], False),
        (["Reshape old s -> v", "Relu v -> r", "ScatterND v at r -> new"], True),
        (["ScatterND old at rows -> mid", "ScatterND mid at more -> new"], True),
        (["ScatterND zeros at old -> new"], False),
        (["ScatterND old at old -> new"], False),
        (["Reshape old s -> v", "ScatterND old at v -> new"], False),
        (["Add old one -> new"], False),
        (["Add old one -> mid", "Mul mid two -> new"], True),
        (["Relu rows -> y"], False),
    ],
)
def test_a_result_may_lie_in_the_old_value_only_if_all_readers_feed_the_write(nodes, expected):
    assert may_alias(graph(*nodes), "old", "new") is expected


def test_a_graph_with_a_branch_never_aliases():
    branch = helper.make_graph([helper.make_node("Relu", ["old"], ["y"])], "branch", [], [])
    node = helper.make_node("If", ["flag"], ["y"], then_branch=branch, else_branch=branch)
    write = helper.make_node("ScatterND", ["old", "at", "rows"], ["new"])
    assert not may_alias(helper.make_graph([write, node], "test", [], []), "old", "new")
