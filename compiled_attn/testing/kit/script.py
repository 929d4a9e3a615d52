"""Writes a failing case as a script that needs only torch and the op.

It contains the functions of the kit that it calls, as they are, so it computes what the kit did.
"""

from __future__ import annotations

import ast
import dis
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from compiled_attn.testing.kit.interface import Interface
from compiled_attn.testing.kit.result import Result
from compiled_attn.testing.kit.scene import Expression, Scene
from compiled_attn.testing.kit.step import Step
from compiled_attn.testing.kit.subject import Subject
from compiled_attn.testing.kit.tensors import bits, tensors_in, widened
from compiled_attn.testing.kit.trial import difference

__all__ = ["script"]

_OURS = "compiled_attn.testing"

_HEAD = '''\
"""{title}

{message}

Written by `python -m compiled_attn.testing`; runs alone, and exits with 1 while the case fails.
"""

from __future__ import annotations

import math
import sys
from math import inf, nan
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

{op}

DEVICE = {device!r}
ALLOWED, ALLOWED_LSE = {allowed!r}  # derived from plain torch in the op's dtype
REAL = {real}  # query rows that belong to a request

'''

_VALUES = """
s = step()
args, kwargs = arguments(s)
want, want_lse = expected(args, kwargs)
compare(called(args, kwargs), want, want_lse)
"""

_NEIGHBOURS = """
args, kwargs = arguments(s := step())
before = called(args, kwargs)[0].clone()
for mine, rows, slots in NEIGHBOURS:
    s = step()
    for name in ("query", "key", "value"):  # what belongs to others becomes nan
        if getattr(s, name) is not None:
            getattr(s, name)[rows] = nan
    for name in CACHES:
        if getattr(s, name) is not None:
            getattr(s, name)[slots] = nan
    args, kwargs = arguments(s)
    after = called(args, kwargs)[0]
    if not torch.equal(before[mine], after[mine]):
        fail(f"rows {mine}: {before[mine].flatten()[:4]} became {after[mine].flatten()[:4]}")
"""

_MEMORY = """
s = step()
args, kwargs = arguments(s)
want, want_lse = expected(args, kwargs)  # writes what the call should
right = [each.clone() for each in tensors_in((args[OUTPUTS:], kwargs))]
s = step()
args, kwargs = arguments(s)
got = called(args, kwargs)
now = [each.clone() for each in tensors_in((args[OUTPUTS:], kwargs))]
if ALLOWED:
    compare(got, want, want_lse)
for number, (a, b) in enumerate(zip(right, now)):
    if bits(a)[0].ne(bits(b)[0]).any():
        fail(f"tensor {number} of the arguments, {a.dtype} {[*a.shape]}, differs after the call")
"""

_REPLAY = """
s, other = step(), other_step()
args, kwargs = arguments(s)
new = [each.clone() for each in tensors_in(arguments(other))]
want, want_lse = expected(*arguments(other_step()))


def again():
    return op(*args, **kwargs)


run = again
if CAPTURED:
    run = torch.compile(again, fullgraph=True, backend="eager")
    if DEVICE != "cpu":
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            returned = again()
        run = lambda: (graph.replay(), returned)[1]
run()
for tensor, value in zip(tensors_in((args, kwargs)), new):
    tensor.copy_(value)
compare(results(run(), args), want, want_lse)
"""

_TAIL = """

print("the case passes")
"""

_HELPERS = '''

def fail(text: str) -> None:
    print(text)
    sys.exit(1)


def called(args, kwargs):
    """The results of the op."""
    return results(op(*args, **kwargs), args)


def expected(args, kwargs):
    """The results of the reference, in float64."""
    returned = {reference}(*args, **kwargs, dtype=torch.float64)
    return results(returned, (returned,))


def compare(got, want, want_lse):
    found = difference(got[0][REAL], want[REAL], ALLOWED, "out")
    if found is None and s.lse:
        found = difference(got[1][REAL], want_lse[REAL], ALLOWED_LSE, "lse")
    if found is None and not got[0].isfinite().all():
        found = "a row that belongs to no request is not finite"
    if found is not None:
        fail(found)

'''


def script(subject: Subject, result: Result) -> str:
    """Returns the script of a failed result; ``subject.source`` says how the op is imported."""
    step, check = result.step, result.case.check.__name__
    assert step is not None
    trial, interface = subject.trial, subject.interface
    scene = Scene(step, interface.rows != "any")
    call = trial.call(step)
    allowed = trial.want(call)[1]
    body = {"values": _VALUES, "neighbours": _NEIGHBOURS, "replay": _REPLAY}.get(check, _MEMORY)
    first = f"{result.case.name}: a kernel must guarantee that {result.case.guarantee}"
    device = subject.claims.device
    functions: list[Callable[..., Any]] = [interface.reference, difference]
    data = [_builder("step", scene, device)]
    if check == "replay":
        data.append(_builder("other_step", Scene(step.changed(), interface.rows != "any"), device))
        functions.append(tensors_in)
        # Else the kit called it twice.
        data.append(f"CAPTURED = {not result.message.startswith('called again')}\n")
    if check == "neighbours":
        data.append(_others(scene, step))
    if body is _MEMORY:
        data.append(f"OUTPUTS = {interface.outputs}  # leading arguments that are outputs\n")
        functions += [bits, tensors_in]
    head = _HEAD.format(
        title=textwrap.fill(f"{first}; {subject.name} does not.", 96),
        message=textwrap.fill(result.message, 96),
        op=_import(subject.source), device=device, allowed=allowed, real=scene.real,
    )  # fmt: skip
    text = "\n".join(_sources([*functions, *_functions_of(scene)], interface))
    helpers = _HELPERS.format(reference=interface.reference.__name__)
    whole = "\n".join([head, *data, text, helpers, body.strip("\n"), _TAIL.strip("\n"), ""])
    return re.sub(r"\n{4,}", "\n\n\n", whole)


def _import(source: str | None) -> str:
    if source is None:
        return "op = ...  # the op under test: import it here"
    module, _, name = source.rpartition(":")
    first, *rest = name.removesuffix("()").split(".")
    tail = "".join(f".{each}" for each in rest) + "()" * name.endswith("()")
    before = ""
    if module.endswith(".py"):
        before = f"sys.path.insert(0, {str(Path(module).parent)!r})\n"
        module = Path(module).stem
    return f"{before}from {module} import {first}\n\nop = {first}{tail}  # the op under test"


def _builder(name: str, scene: Scene, device: str) -> str:
    plain = [f"{k}={v!r}" for k, v in scene.fields.items() if not isinstance(v, Expression)]
    fields = [", ".join(plain)]
    fields += [
        f"{k}={v.text(device)}" for k, v in scene.fields.items() if isinstance(v, Expression)
    ]
    lines = [f"def {name}() -> SimpleNamespace:", '    """The fields of the step."""']
    lines.append("    return SimpleNamespace(")
    for field in fields:
        lines += textwrap.wrap(
            f"{field},", 96, initial_indent=" " * 8, subsequent_indent=" " * 12,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    return "\n".join([*lines, "    )", "", ""])


def _others(scene: Scene, step: Step) -> str:
    """What `compiled_attn.testing.kit.checks.neighbours` makes nan, for both requests."""
    each = []
    for request in dict.fromkeys((0, len(step.requests) - 1)):
        mine = [*scene.rows_of(request)]
        rows = [row for row in range(scene.tokens) if row not in mine]
        own = {*scene.owned[request]}
        slots = [at for slots in scene.owned for at in slots if at not in own]
        each.append((mine, rows, ([block for block, _ in slots], [slot for _, slot in slots])))
    caches = [] if step.cache == "int8" else ["key_cache", "value_cache"]
    caches += ["key_scale", "value_scale"] if step.cache else []
    return (
        f"# Rows of a request; rows and slots of the others.\nNEIGHBOURS = {each}\n"
        f"CACHES = {caches}\n"
    )


def _functions_of(scene: Scene) -> Iterator[Callable[..., Any]]:
    def walk(value: Any) -> Iterator[Callable[..., Any]]:
        if isinstance(value, Expression):
            yield value.function
            for each in value.arguments:
                yield from walk(each)

    for value in scene.fields.values():
        yield from walk(value)
    if scene.step.strided:
        yield widened


def _sources(functions: list[Callable[..., Any]], interface: type[Interface]) -> Iterator[str]:
    """Sources of functions and of all functions and constants of the kit that they name."""
    found: dict[str, str] = {}

    def add(function: Any) -> None:
        if function.__name__ in found:
            return
        found[function.__name__] = ""  # before what it names, which may name it
        for name in _names(function.__code__):
            used = function.__globals__.get(name)
            module = getattr(used, "__module__", "") or ""
            if inspect.isfunction(used) and module.startswith(_OURS):
                add(used)
            elif name.isupper() and name in function.__globals__ and name not in found:
                found[name] = f"{name} = {used!r}\n\n"
        text = _first_line_of_docstring(textwrap.dedent(inspect.getsource(function)))
        text = re.sub(r"  # (type: ignore.*|fmt: skip)$", "", text, flags=re.MULTILINE)
        text = text.removeprefix("@staticmethod\n")
        # Last, so that a function is below those that it calls.
        found.pop(function.__name__)
        found[function.__name__] = f"\n{text}\n"

    for each in (*functions, interface.arguments, interface.results):
        add(each)
    for text in found.values():
        yield text.replace(" -> Arguments:", ":")


def _first_line_of_docstring(source: str) -> str:
    """Shortens the docstring of a function to its first line; drops "See `Interface.results`."."""
    text = ast.get_docstring(ast.parse(source).body[0], clean=False)  # type: ignore[arg-type]
    first = (text or "").partition("\n")[0]
    if first.startswith("See `"):
        return source.replace(f'    """{text}"""\n', "", 1)
    return source.replace(text, first, 1) if text else source


def _names(code: CodeType) -> Iterator[str]:
    yield from (each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
