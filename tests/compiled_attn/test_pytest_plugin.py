"""The plugin as its users have it: in test files of their own."""

from __future__ import annotations

import pytest
import torch

from graphs import explain

pytest_plugins = ["pytester"]

HEAD = """
import pytest
import torch

def fresh(function):
    return torch.compile(function, backend="eager", dynamic=False)

def doubled(x):
    return x * 2

def broken(x):
    x = x + 1
    print("side effect")
    return x * 2
"""


@pytest.fixture(scope="module", autouse=True)
def torch_has_imported_what_it_needs():
    """Pytester forgets the modules that a run has imported, and torch cannot be imported twice."""

    def broken(x):
        torch._dynamo.graph_break()
        return x + 1

    explain(broken, torch.ones(1))
    torch.compile(broken, backend="eager")(torch.ones(1))


@pytest.fixture
def run(pytester):
    """Runs the text of a test file, and counts its outcomes."""

    def run(text, **outcomes):
        pytester.makepyfile(HEAD + text)
        result = pytester.runpytest("--strict-markers", "-p", "compiled_attn.pytest_plugin")
        result.assert_outcomes(**outcomes)
        return result.stdout

    return run


def test_compile_counter_counts_new_graphs_only(run):
    run(
        """
def test_counts(compile_counter):
    function = fresh(lambda x: x * 3)
    with compile_counter.expect(graphs=2) as watch:
        for size in (2, 3, 2, 3):
            function(torch.ones(size))
    assert [event.kind for event in watch.events] == ["compile", "recompile"]
    with compile_counter.expect(graphs=0):
        function(torch.ones(2))
    with compile_counter.expect(graphs=2, graph_breaks=1):
        fresh(broken)(torch.ones(2))
""",
        passed=1,
    )


def test_compile_counter_names_each_compile_and_its_cause(run):
    out = run(
        """
def test_more(compile_counter):
    function = fresh(doubled)
    with compile_counter.expect(graphs=1):
        function(torch.ones(2))
        function(torch.ones(3))

def test_fewer(compile_counter):
    with compile_counter.expect(graphs=1):
        pass

def test_breaks(compile_counter):
    with compile_counter.expect(graphs=2, graph_breaks=0):
        fresh(broken)(torch.ones(2))
""",
        failed=3,
    )
    out.fnmatch_lines(
        [
            ">       with compile_counter.expect(graphs=1):",
            "*AssertionError: expected 1 graph(s), got 2 with 0 graph break(s):",
            "*  compile of doubled (*.py:7)",
            "*  recompile of doubled (*.py:7): tensor 'x' size mismatch at index 0. expected 2, *",
            "*AssertionError: expected 1 graph(s), got 0 with 0 graph break(s)",
            "*AssertionError: expected 0 graph break(s), got 2 with 1 graph break(s):",
        ]
    )


def test_an_error_inside_expect_is_not_hidden_by_the_count(run):
    out = run(
        """
def test_raises(compile_counter):
    with compile_counter.expect(graphs=7):
        raise KeyError("mine")
""",
        failed=1,
    )
    out.fnmatch_lines(["*KeyError: 'mine'"])
    out.no_fnmatch_line("*expected 7*")


def test_a_reset_of_dynamo_meanwhile_is_an_error_and_before_it_does_no_harm(run):
    out = run(
        """
def test_meanwhile(compile_counter):
    with compile_counter.expect(graphs=0):
        torch._dynamo.reset()

@pytest.mark.max_graphs(0)
def test_in_the_body():
    torch._dynamo.reset()

def test_before(compile_counter):
    torch._dynamo.reset()
    with compile_counter.expect(graphs=1):
        fresh(doubled)(torch.ones(2))
""",
        passed=1,
        failed=2,
    )
    out.fnmatch_lines(["*torch._dynamo.reset() was called meanwhile*"] * 2)


def test_assert_fullgraph_shows_the_breaks_with_their_lines(run):
    out = run(
        """
def test_full(assert_fullgraph):
    report = assert_fullgraph(doubled, torch.ones(2))
    assert len(report.graphs) == 1 and "mul" in report.graphs[0]

def test_broken(assert_fullgraph):
    assert_fullgraph(broken, torch.ones(2))

def test_empty(assert_fullgraph):
    assert_fullgraph(lambda x: x, torch.ones(2))
""",
        passed=1,
        failed=2,
    )
    out.fnmatch_lines(
        [
            ">       assert_fullgraph(broken, torch.ones(2))",
            "*AssertionError: expected one full graph, got broken: 2 graph(s), 1 break(s), *",
            "*break 0: *.py:12: *",
            '*print("side effect")',
            "*AssertionError: expected one full graph, got <lambda>: 0 graph(s), 0 break(s), *",
        ]
    )


def test_max_graphs_limits_the_body_of_a_test(run):
    out = run(
        """
@pytest.fixture
def function():
    function = fresh(lambda x: x - 1)
    function(torch.ones(1))
    return function

@pytest.mark.max_graphs(0)
def test_fixtures_do_not_count(function):
    function(torch.ones(1))

@pytest.mark.max_graphs(1)
def test_too_many(function):
    for size in range(1, 4):
        function(torch.ones(size))

@pytest.mark.max_graphs(2)
class TestClass:
    def test_its_own_error(self):
        assert 1 == 2
""",
        passed=1,
        failed=2,
    )
    out.fnmatch_lines(
        [
            "expected at most 1 graph(s), got 2 with 0 graph break(s):",
            "  recompile of <lambda> (*): tensor 'x' size mismatch at index 0. expected 1, *",
            "  recompile of <lambda> (*): tensor 'x' size mismatch at index 0. expected 2, *",
            "*assert 1 == 2*",
        ]
    )


@pytest.mark.parametrize("arguments", ["", "1, 2", "'3'", "n=3"])
def test_max_graphs_wants_one_number(run, arguments):
    out = run(
        f"""
@pytest.mark.max_graphs({arguments})
def test_nothing():
    pass
""",
        failed=1,
    )
    out.fnmatch_lines(["expected max_graphs(n) with one whole number, got *"])


@pytest.mark.parametrize("variable", [None, "TORCH_LOGS"])
def test_torchs_trace_is_kept_out_of_the_captured_log(variable, run, monkeypatch):
    for name in ("TORCH_LOGS", "TORCH_TRACE"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "+dynamo")
    out = run(
        """
import logging

def test_fails():
    logging.getLogger("mine").warning("my line")
    logging.getLogger("torch.__trace").debug("")
    fresh(doubled)(torch.ones(2))
    assert 0
""",
        failed=1,
    )
    out.fnmatch_lines(["WARNING *mine:*my line"])
    if variable is None:
        out.no_fnmatch_line("DEBUG *torch.__trace:*")
    else:
        out.fnmatch_lines(["DEBUG *torch.__trace:*"])
