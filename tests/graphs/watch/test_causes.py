from traceback import FrameSummary

import pytest
import torch

from graphs.capture import inputs
from graphs.watch.causes import (
    describe_failure,
    reason_of,
    site_of_error,
    site_of_stack,
    user_line,
    user_line_in,
)


class CppCompileError(RuntimeError):
    """Like torch's error, its text begins with the command."""


def test_a_failed_cpp_compile_is_described_by_its_error_line():
    text = (
        "C++ compile error\n\nCommand:\ng++ -O3 x.cpp -Werror=foo\n\nOutput:\nIn file included\n"
        "x.cpp:2:10: fatal error: Python.h: No such file or directory\ncompilation terminated."
    )
    assert reason_of(CppCompileError(text)).endswith(
        "fatal error: Python.h: No such file or directory"
    )


def test_an_error_without_text_is_described_by_its_type():
    assert reason_of(KeyError()) == "KeyError"
    assert describe_failure(ValueError("first\nsecond")) == "ValueError: first"


def test_the_inner_error_of_a_failing_compiler_is_what_counts():
    def failing_compiler(graph, inputs):
        raise ZeroDivisionError("no luck")

    with pytest.raises(Exception) as caught:
        torch.compile(lambda x: x + 1, backend=failing_compiler)(torch.ones(1))
    assert describe_failure(caught.value) == "ZeroDivisionError: no luck"


def breaking(x):
    torch._dynamo.graph_break()
    return x + 1


def test_a_graph_break_is_described_with_the_users_line():
    with pytest.raises(Exception) as caught:
        torch.compile(breaking, backend="eager", fullgraph=True)(torch.ones(1))
    first = breaking.__code__.co_firstlineno
    assert user_line(caught.value) == (__file__, first + 1)
    assert describe_failure(caught.value).startswith(f"{__file__}:{first + 1}: ")
    assert "\n" not in describe_failure(caught.value)


def test_the_users_line_is_the_innermost_that_is_not_torchs():
    wrapper, mine, deeper, theirs = (
        FrameSummary(file, line, "forward")
        for line, file in enumerate([inputs.__file__, "a.py", "b.py", torch.nn.__file__])
    )
    assert user_line_in([wrapper, mine, deeper, theirs]) == ("b.py", 2)
    assert user_line_in([wrapper, theirs]) == (torch.nn.__file__, 3)
    assert user_line_in([wrapper]) == user_line_in([]) == ("", 0)


def test_outside_of_a_compile_there_is_no_site():
    assert site_of_stack() is None
    assert site_of_error(ValueError()) is None


def test_the_site_of_a_recompile_has_the_function_and_the_failed_guard():
    sites = []

    def compiler(graph, inputs):
        sites.append(site_of_stack())
        return graph.forward

    def scaled(x):
        return x * 2

    compiled = torch.compile(scaled, backend=compiler, dynamic=False)
    compiled(torch.ones(4))
    compiled(torch.ones(5))
    first, second = sites
    assert (first.function, first.file, first.reason) == ("scaled", __file__, "")
    assert first.line == scaled.__code__.co_firstlineno
    assert second.reason == "tensor 'x' size mismatch at index 0. expected 4, actual 5"
