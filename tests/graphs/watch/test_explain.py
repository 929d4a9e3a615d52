import torch
from torch import nn

from graphs import BreakReport, capture, explain
from graphs.watch.explain import Break


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.factor = 3

    def forward(self, hidden):
        return hidden * self.weight * self.factor


def broken(x):
    x = x + 1
    print("side effect")
    return x * 2


def test_a_full_graph_has_no_break_and_its_ops_in_order():
    report = explain(Scaled(), torch.ones(2, 4))
    assert report.name == "Scaled"
    assert report.breaks == ()
    (graph,) = report.graphs
    lines = [line for line in graph.splitlines() if "operator.mul" in line]
    assert len(lines) == 2
    assert "graph 0:" in str(report) and "0 break(s)" in str(report)


def test_guards_are_described_in_terms_of_the_callable():
    guards = explain(Scaled(), torch.ones(2, 4)).guards
    assert "hidden is float32[2, 4] on cpu" in guards
    assert "Scaled.factor == 3" in guards
    assert not any("inputs" in guard for guard in guards)


def test_guards_on_the_identity_of_modules_and_dynamos_marks_are_left_out():
    def activated(x):
        return torch.nn.functional.relu(x) + Scaled.__name__.count("S")

    guards = explain(activated, torch.ones(2)).guards
    assert "x is float32[2] on cpu" in guards
    assert not any("_dynamo_" in text or "global torch" in text for text in guards)
    assert not any("___check" in text for text in guards)


def test_graphs_and_guards_can_be_left_out_of_the_text():
    report = explain(Scaled(), torch.ones(2, 4))
    assert report.text(graphs=False, guards=False) == str(report).split("\n")[0]
    assert "graph 0" not in report.text(graphs=False) and "guards:" in report.text(graphs=False)


def test_a_break_has_its_reason_and_the_users_line():
    report = explain(broken, torch.ones(2))
    (found,) = report.breaks
    assert (found.file, found.line) == (__file__, broken.__code__.co_firstlineno + 2)
    assert "builtin" in found.reason
    assert len(report.graphs) == 2
    assert f"break 0: {__file__}:{found.line}: " in str(report)
    assert 'print("side effect")' in str(report)


def test_the_normalized_text_has_what_stays_from_version_to_version():
    assert explain(broken, torch.ones(2)).normalized() == (
        "broken: 2 graph(s), 1 break(s)\n"
        'break 0: print("side effect")\n'
        "graph 0:\n"
        "    add\n"
        "graph 1:\n"
        "    mul"
    )
    assert explain(Scaled(), torch.ones(2, 4)).normalized().endswith("graph 0:\n    mul mul")


def test_the_normalized_text_drops_paths_lines_reasons_nodes_and_guards():
    def report(path, line, reason, node, guards):
        graph = (
            f"graph():\n    %{node} : torch.Tensor [num_users=1] = placeholder[target={node}]\n"
            f"    %y : [users=1] = call_function[target=operator.getitem](args = (%{node},))\n"
            "    %z : [users=1] = call_function[target=torch._C._nn.linear](args = (%y,))\n"
            f"    %relu_{line} : [users=1] = call_method[target=relu](args = (%z,))\n"
        )
        return BreakReport("f", (graph,), (Break(reason, path, line),), guards)

    old = report("/old/f.py", 3, "call to print", "l_x_", ("x == 1",))
    new = report("/new/f.py", 9, "builtin print", "arg0", ())
    assert str(old) != str(new)
    assert old.normalized() == new.normalized()
    assert old.normalized() == "f: 1 graph(s), 1 break(s)\nbreak 0: ?\ngraph 0:\n    linear relu"


def test_a_function_that_torch_gives_up_whole_is_explained_too():
    def unsupported(x):
        try:
            with open(__file__):
                torch._dynamo.graph_break()
                return x + 1
        finally:
            pass

    report = explain(unsupported, torch.ones(2))
    assert report.graphs == ()
    assert len(report.breaks) == 1
    assert report.breaks[0].file == __file__


def test_explaining_leaves_captured_graphs_and_later_compiles_alone():
    def scale(x):
        print("x", end="")
        return x * 2

    module = Scaled()
    with torch.no_grad():
        graph = capture(module, [torch.ones(2, 4)], backend="aot_eager")
        for _ in range(9):
            explain(module, torch.ones(2, 4))
        with torch.compiler.set_stance("fail_on_recompile"):
            assert graph.run(torch.ones(2, 4)).unique().tolist() == [3]
    assert torch.compile(scale, backend="eager")(torch.ones(1)).item() == 2


def test_the_callable_runs_once_for_real():
    count = torch.zeros(1)
    explain(lambda x: count.add_(x), torch.ones(1))
    assert count.item() == 1
