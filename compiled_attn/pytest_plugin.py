"""pytest plugin: limits how often a test may compile, asserts full graphs, runs conformance suites.

`pytest --graphs-backend module:Backend` runs the conformance suite of
:mod:`graphs.backends.conformance` on a backend, `pytest --paged-attention module:op` that of
:mod:`compiled_attn.testing.kit` on an op: alone, or before the paths that are given.

Loaded automatically where the project is installed (entry point `pytest11`), else with `-p
compiled_attn.pytest_plugin`. As it is then loaded for every project of that environment, it imports
`graphs` and torch only for tests that use it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Generator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from compiled_attn.shadow import foreign_graphs, refuse_foreign_graphs, shadowed

if TYPE_CHECKING:
    from graphs.capture.inputs import Input
    from graphs.watch.compiles import CompileWatch
    from graphs.watch.explain import BreakReport

__all__ = ["CompileCounter", "assert_fullgraph", "compile_counter"]

_BLIND = (
    "torch._dynamo.reset() was called meanwhile, and later compiles were not seen: call it before"
)


class CompileCounter:
    """Counts the graphs that are compiled inside a `with` statement; the fixture `compile_counter`.

    with compile_counter.expect(graphs=2):
        for x in (torch.ones(2), torch.ones(3), torch.ones(2)):
            compiled(x)
    """

    def expect(self, *, graphs: int, graph_breaks: int | None = None) -> _Expectation:
        """Expects exactly so many new graphs, in all threads, and graph breaks if given.

        The `with` statement yields the :class:`~graphs.CompileWatch`, whose `events` describe each
        compile.

        Raises:
            AssertionError: at the end, if there were more or fewer, with a line for each compile;
                or if `torch._dynamo.reset()` was called meanwhile.
        """
        return _Expectation(graphs, graph_breaks)


class _Expectation:
    def __init__(self, graphs: int, graph_breaks: int | None) -> None:
        refuse_foreign_graphs()
        from graphs.watch.compiles import CompileWatch

        self._graphs, self._graph_breaks, self._watch = graphs, graph_breaks, CompileWatch()

    def __enter__(self) -> CompileWatch:
        self._watch.start()
        return self._watch

    def __exit__(self, kind: object, *exc_info: object) -> None:
        __tracebackhide__ = True
        watch, is_blind = self._watch, self._watch.lost
        watch.stop()
        if kind is not None:
            return
        if is_blind:
            raise AssertionError(_BLIND)
        if watch.graphs != self._graphs:
            raise AssertionError(_differs(f"{self._graphs} graph(s)", watch))
        if self._graph_breaks not in (None, watch.graph_breaks):
            raise AssertionError(_differs(f"{self._graph_breaks} graph break(s)", watch))


@pytest.fixture
def compile_counter() -> CompileCounter:
    """Counts compiled graphs: `with compile_counter.expect(graphs=2): ...`."""
    return CompileCounter()


@pytest.fixture
def assert_fullgraph() -> Callable[..., BreakReport]:
    """`assert_fullgraph(callable, *inputs)`: asserts that it traces as one graph.

    Runs the callable once on the inputs, under the current grad mode. Returns the
    :class:`~graphs.BreakReport`.
    """

    def check(callable: Callable[..., Any], *inputs: Input) -> BreakReport:
        __tracebackhide__ = True
        refuse_foreign_graphs()
        from graphs.watch.explain import explain

        report = explain(callable, *inputs)
        if report.breaks or len(report.graphs) != 1:
            found = report.text(graphs=False, guards=False)
            raise AssertionError(f"expected one full graph, got {found}")
        return report

    return check


class ForeignGraphsWarning(pytest.PytestWarning):
    """Another package `graphs` shadows ours, so the plugin is disabled."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the conformance suites."""
    group = parser.getgroup("graphs", "capture backends of graphs")
    group.addoption(
        "--graphs-backend",
        metavar="MODULE:NAME",
        help="run the conformance suite on a capture backend: an object, a class or function that "
        "makes one, or the name of a backend of graphs",
    )
    group.addoption(
        "--graphs-device",
        metavar="DEVICE",
        help="where the suite puts its tensors; default: the backend's `device`, else cpu",
    )
    group = parser.getgroup("paged attention", "kernels of compiled_attn.testing")
    group.addoption(
        "--paged-attention",
        metavar="MODULE:OP",
        help="run the conformance kit on a paged attention op that declares its capabilities",
    )
    group.addoption(
        "--paged-attention-interface",
        metavar="NAME",
        help="its signature, or MODULE:CLASS of your own; default: by its parameters",
    )
    group.addoption(
        "--paged-attention-device",
        metavar="DEVICE",
        help="where the kit puts its tensors; default: the device that the op declares",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Forget the package before the project is imported, which may have its own `graphs`."""
    _forget_package()


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and warn of another `graphs`."""
    config.addinivalue_line(
        "markers", "max_graphs(n): the test fails if its body compiles more than n graphs"
    )
    _forget_package()  # if a conftest.py names the plugin, pytest calls only this hook
    if (path := foreign_graphs()) is not None:
        _warn(config, path)
    for option, (package, *suite) in _SUITES.items():
        if config.getoption(option, None) is not None:
            _add_suite(config, path, option, package, *suite)


# The package and the file of tests of each option.
_SUITES = {
    "graphs_backend": ("graphs", "backends", "conformance", "test_backend.py"),
    "paged_attention": ("compiled_attn", "testing", "kit", "test_op.py"),
}


def _add_suite(
    config: pytest.Config, foreign: str | None, option: str, package: str, *suite: str
) -> None:
    name = f"--{option.replace('_', '-')}"
    if foreign is not None:
        raise pytest.UsageError(f"{name}: {shadowed(foreign)}")
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise pytest.UsageError(f"{name}: package {package} is not installed")
    path = Path(spec.origin).parent.joinpath(*suite)
    is_given = config.args_source is pytest.Config.ArgsSource.ARGS
    if not hasattr(config, "workerinput"):  # pytest-xdist passes its arguments on
        config.args[:] = [str(path), *(config.args if is_given else ())]
    # As `python -m pytest` does, for a module in the current folder.
    if (here := str(config.invocation_params.dir)) not in sys.path:
        sys.path.insert(0, here)


def pytest_collection(session: pytest.Session) -> None:
    """Look up what the conformance suites are for, before any of their tests."""
    config = session.config
    backend, op = (config.getoption(option, None) for option in _SUITES)
    if backend is not None:
        from graphs.backends.conformance import load

        try:
            load(backend, config.getoption("graphs_device"))
        except ValueError as error:
            raise pytest.UsageError(str(error)) from error
    if op is not None:
        _find_op(config, op)


def _find_op(config: pytest.Config, op: str) -> None:
    from compiled_attn.testing.kit.load import find
    from graphs.cli.errors import UserError

    device = config.getoption("paged_attention_device")
    changes = None if device is None else {"device": device}
    try:
        found = find(op, config.getoption("paged_attention_interface"), changes)
    except (ValueError, UserError) as error:
        raise pytest.UsageError(f"--paged-attention {op}: {error}") from error
    config.stash[SUBJECT] = found


SUBJECT = pytest.StashKey[Any]()
"""The op that `--paged-attention` names, as a `compiled_attn.testing.kit.Subject`."""


def pytest_sessionstart(session: pytest.Session) -> None:
    """Keep torch's trace out of the captured log; pytest's handlers exist only now."""
    if os.environ.get("TORCH_LOGS") or os.environ.get("TORCH_TRACE") or foreign_graphs():
        return
    for handler in _capturing(session.config):
        handler.addFilter(_is_no_trace)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the filters of pytest's handlers."""
    for handler in _capturing(config):
        handler.removeFilter(_is_no_trace)


def _forget_package() -> None:
    # See compiled_attn/__init__.py: a later import must raise.
    if foreign_graphs() is not None:
        sys.modules.pop("compiled_attn", None)


def _warn(config: pytest.Config, path: str) -> None:
    if hasattr(config, "workerinput"):  # pytest-xdist: the parent process has warned
        return
    text = f"the pytest plugin of compiled_attn is disabled: {shadowed(path)}"
    try:
        config.issue_config_time_warning(ForeignGraphsWarning(text), stacklevel=2)
    except ForeignGraphsWarning:  # the project turns warnings into errors
        print(f"warning: {text}", file=sys.stderr)


def _capturing(config: pytest.Config) -> list[logging.Handler]:
    """Handlers of pytest, which also adds them to loggers that do not propagate."""
    plugin = config.pluginmanager.get_plugin("logging-plugin")
    found = vars(plugin).values() if plugin is not None else ()
    return [each for each in found if isinstance(each, logging.Handler)]


def _is_no_trace(record: logging.LogRecord) -> bool:
    # torch logs an empty line for each artifact of `tlparse`, many for each compile.
    return record.name != "torch.__trace"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Count what a test with the marker `max_graphs` compiles, without its fixtures."""
    marker = item.get_closest_marker("max_graphs")
    if marker is None:
        return (yield)
    if len(marker.args) != 1 or marker.kwargs or type(marker.args[0]) is not int:
        got = f"{marker.args} {marker.kwargs}"
        pytest.fail(f"expected max_graphs(n) with one whole number, got {got}", pytrace=False)
    most = marker.args[0]
    if (path := foreign_graphs()) is not None:
        pytest.fail(shadowed(path), pytrace=False)
    from graphs.watch.compiles import CompileWatch

    with CompileWatch() as watch:
        result = yield
        is_blind = watch.lost
    if is_blind:
        pytest.fail(_BLIND, pytrace=False)
    if watch.graphs > most:
        pytest.fail(_differs(f"at most {most} graph(s)", watch), pytrace=False)
    return result


def _differs(expected: str, watch: CompileWatch) -> str:
    head = f"expected {expected}, got {watch.graphs} with {watch.graph_breaks} graph break(s)"
    return "\n".join([head + (":" if watch.events else ""), *(f"  {e}" for e in watch.events)])
