"""Explain what torch.compile makes of a callable: graphs, breaks and guards.

Unlike Dynamo's own `explain`, this does not reset Dynamo: captured graphs stay compiled.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from textwrap import fill, indent
from typing import Any

import torch
from torch.fx import GraphModule

from graphs.capture.inputs import name_of, parameter_names, with_own_code
from graphs.capture.structure import flat_call
from graphs.torch_internals.tracing import break_reasons, trace, why_no_full_graph
from graphs.watch.causes import reason_of, user_line, user_line_in
from graphs.watch.guards import readable

__all__ = ["BreakReport", "explain"]

# Guards on torch's own marks on tensors, and on the identity of imported modules and builtins.
_NOISE = ("_dynamo_", "type=<class 'module'>", "type=<module ", "__builtins_dict__")
# Guards on the wrapper of nested inputs, which the user does not know.
_OF_WRAPPER = re.compile(r"FlatCall|___unnamed_scope|L\['function'\]\._(modules|parameters)(?!\[)")
_WRAPPED = re.compile(r"L\['function'\](\._modules\['function'\]|\.function\b)?")
_OPERATION = re.compile(r" = call_\w+\[target=(?:[^\]]*\.)?([^\].]+)\]")
# Operations that unpack values and set modes; versions of torch differ in them.
_PLUMBING = frozenset({"getattr", "getitem", "_set_grad_enabled"})
_WRAPPED_INPUT = re.compile(r"L\['inputs'\]\[(\d+)\]")


@dataclass(frozen=True)
class Break:
    """One graph break: why, and the user's line."""

    reason: str
    file: str
    line: int

    def __str__(self) -> str:
        location = f"{self.file}:{self.line}: " if self.file else ""
        return f"{location}{self.reason}" + (f"\n    {self.code}" if self.code else "")

    @property
    def code(self) -> str:
        """The text of the user's line; empty if its file cannot be read."""
        return linecache.getline(self.file, self.line).strip()


@dataclass(frozen=True)
class BreakReport:
    """What :func:`explain` found; its `str` is meant to be read.

    Attributes:
        name: of the callable.
        graphs: the FX graphs as text, one line for each node, in the order they were traced.
        breaks: the graph breaks; none means that `fullgraph=True` works.
        guards: the conditions under which the graphs hold, as Python expressions.
    """

    name: str
    graphs: tuple[str, ...]
    breaks: tuple[Break, ...]
    guards: tuple[str, ...]

    def text(self, *, graphs: bool = True, guards: bool = True) -> str:
        """The report as text, with or without its graphs and guards."""
        counts = (
            f"{len(self.graphs)} graph(s), {len(self.breaks)} break(s), {len(self.guards)} guard(s)"
        )
        lines = [f"{self.name}: {counts}"]
        lines += [f"break {i}: {found}" for i, found in enumerate(self.breaks)]
        if graphs:
            lines += [f"graph {i}:\n{indent(graph, '    ')}" for i, graph in enumerate(self.graphs)]
        if guards and self.guards:
            lines += ["guards:", *(f"    {guard}" for guard in self.guards)]
        return "\n".join(lines)

    def normalized(self) -> str:
        """The report for a snapshot: the code at each break, and the operations of each graph.

        Leaves out what differs between versions of torch, machines and checkouts: torch's reasons,
        guards, names of nodes, paths and line numbers.
        """
        lines = [f"{self.name}: {len(self.graphs)} graph(s), {len(self.breaks)} break(s)"]
        lines += [f"break {i}: {found.code or '?'}" for i, found in enumerate(self.breaks)]
        for i, graph in enumerate(self.graphs):
            names = [name for name in _OPERATION.findall(graph) if name not in _PLUMBING]
            operations = fill(" ".join(names), 90, break_on_hyphens=False, break_long_words=False)
            lines.append(f"graph {i}:\n{indent(operations, '    ')}".rstrip())
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


def explain(callable: Callable[..., Any], /, *inputs: Any, **keywords: Any) -> BreakReport:
    """Trace a callable on `inputs` with static shapes, and report graphs, breaks and guards.

    The callable runs once on `inputs`, its graphs uncompiled, under the current grad mode, and once
    more if torch makes no graph of it. Compiled code of others stays compiled.

    Raises:
        Exception: whatever the callable raises on these inputs.
    """
    name = name_of(callable)
    function, flat, _ = flat_call(callable, inputs, keywords)
    names = dict(enumerate(parameter_names(function, len(flat))))
    graphs: list[str] = []
    guards: set[str] = set()

    def record(graph: GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(str(graph.graph))
        return graph.forward

    def record_guards(found: Iterable[Any]) -> None:
        texts = (text for guard in found for text in _guard_texts(guard))
        renamed = (_in_terms_of_user(text, name, names) for text in texts)
        guards.update(readable(text) for text in renamed if "L['inputs']" not in text)

    before = len(break_reasons())
    trace(with_own_code(function, name), flat, record, record_guards)
    breaks = [_as_break(reason) for reason in break_reasons()[before:]]
    # Where Dynamo skips a whole function, only fullgraph=True gives the reason.
    is_skipped = not graphs and not breaks
    if is_skipped and (error := why_no_full_graph(with_own_code(function, name), flat)):
        breaks = [Break(reason_of(error), *user_line(error))]
    return BreakReport(name, tuple(graphs), tuple(dict.fromkeys(breaks)), tuple(sorted(guards)))


def _guard_texts(guard: Any) -> Iterator[str]:
    value = guard.obj_weakref() if guard.obj_weakref is not None else None
    if isinstance(value, torch.Tensor):
        yield f"{guard.name} is {value.dtype}{list(value.shape)} on {value.device}".replace(
            "torch.", ""
        )
    for text in guard.code_list or ():
        if not any(noise in text for noise in _NOISE) and not _OF_WRAPPER.search(text):
            yield text


def _in_terms_of_user(guard: str, name: str, names: Mapping[int, str]) -> str:
    # Dynamo sees the callable and its inputs through the wrapper of graphs.capture.inputs.
    guard = _WRAPPED.sub(name, guard)
    return _WRAPPED_INPUT.sub(lambda match: names[int(match[1])], guard)


def _as_break(reason: Any) -> Break:
    text = str(reason.reason).strip().split("\n")[0]
    return Break(text, *user_line_in(reason.user_stack))
