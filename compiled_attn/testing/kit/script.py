"""Writes a failing case as a script that needs only torch and the op.

It contains the functions of the kit that it calls, as they are, so it computes what the kit did.
"""

from __future__ import annotations

import math
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from compiled_attn.testing.kit.result import Result
from compiled_attn.testing.kit.scene import Expression, Scene
from compiled_attn.testing.kit.settings import changed, settings
from compiled_attn.testing.kit.sources import Sources
from compiled_attn.testing.kit.step import Step
from compiled_attn.testing.kit.subject import Subject
from compiled_attn.testing.kit.tensors import bits, tensors_in, widened
from compiled_attn.testing.kit.trial import difference

__all__ = ["script"]

_HEAD = '''\
"""{title}

{message}

Written by `python -m compiled_attn.testing`; runs alone, and exits with 1 while the case fails.
"""

from __future__ import annotations

import importlib
import math
import sys
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

{op}

DEVICE = {device!r}
ALLOWED, ALLOWED_LSE = {allowed!r}  # of each row, from plain torch in the op's dtype
REAL = {real}  # query rows that belong to a request

'''

_VALUES = """
s = step()
args, kwargs = arguments(s)
want, want_lse = expected(args, kwargs)
compare(s, called(args, kwargs), want, want_lse)
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
    compare(s, got, want, want_lse)
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
compare(s, results(run(), args), want, want_lse)
"""

_STATE = """
args, kwargs = arguments(step())
with torch.no_grad():
    before = settings(DEVICE)
    op(*args, **kwargs)
    found = changed(before, settings(DEVICE))
if found is not None:
    fail(found)
"""

_HEADER: dict[str, Any] = {
    "math": math, "sys": sys, "inf": inf, "nan": nan, "SimpleNamespace": SimpleNamespace,
    "Any": Any, "torch": torch, "Tensor": Tensor,
}  # fmt: skip
_RESERVED = {
    "importlib", "Path", "op", "step", "other_step", "fail", "called", "expected", "compare",
    "main", "arguments", "results", "DEVICE", "ALLOWED", "ALLOWED_LSE", "REAL", "NEIGHBOURS",
    "CACHES", "OUTPUTS", "CAPTURED",
}  # fmt: skip

_TAIL = """\
    print("the case passes")


main()
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


def compare(s, got, want, want_lse):
    found = difference(got[0][REAL], want[REAL], ALLOWED, "out")
    if found is None and s.lse:
        found = difference(got[1][REAL], want_lse[REAL], ALLOWED_LSE, "lse")
    if found is None and not got[0].isfinite().all():
        found = "a row that belongs to no request is not finite"
    if found is not None:
        fail(found)

'''


def script(subject: Subject, result: Result, folder: Path | None = None) -> str:
    """Returns the script of a failed result; ``subject.source`` says how the op is imported.

    Args:
        subject: the op.
        result: a failed result.
        folder: where the script will be; None: the current folder.
    """
    step, name = result.step, result.case.check.__name__
    check = "replay" if name == "again" else name
    assert step is not None
    trial, interface = subject.trial, subject.interface
    scene = Scene(step, interface.rows != "any")
    call = trial.call(step)
    allowed = trial.want(call)[1]
    bodies = {"values": _VALUES, "neighbours": _NEIGHBOURS, "replay": _REPLAY, "state": _STATE}
    body = bodies.get(check, _MEMORY)
    first = f"{result.case.name}: a kernel must guarantee that {result.case.guarantee}"
    device = subject.claims.device
    functions: list[Callable[..., Any]] = [difference]
    data = [_builder("step", scene, device)]
    if check == "replay":
        data.append(_builder("other_step", Scene(step.changed(), interface.rows != "any"), device))
        functions.append(tensors_in)
        # Else the kit called it twice.
        data.append(f"CAPTURED = {not result.message.startswith('called again')}\n")
    if check == "neighbours":
        data.append(_others(scene, step))
    if check == "state":
        functions += [changed, settings]
    if body is _MEMORY:
        data.append(f"OUTPUTS = {interface.outputs}  # leading arguments that are outputs\n")
        functions += [bits, tensors_in]
    head = _HEAD.format(
        title=textwrap.fill(f"{first}; {subject.name} does not.", 96),
        message=textwrap.fill(result.message, 96),
        op=_import(subject.source, folder or Path.cwd()), device=device, allowed=allowed,
        real=scene.real,
    )  # fmt: skip
    sources = Sources(_RESERVED, _HEADER)
    for each in (*functions, *_functions_of(scene)):
        sources.add(each)
    reference = sources.add(interface.reference)
    for method in (interface.arguments, interface.results):
        sources.add(method, "arguments" if method is interface.arguments else "results")
    helpers = _HELPERS.format(reference=reference)
    main = f"def main() -> None:{textwrap.indent(body, '    ')}{_TAIL}"
    whole = "\n".join([head, *data, *sources.texts(), helpers, main])
    return re.sub(r"\n{4,}", "\n\n\n", whole)


def _import(source: str | None, folder: Path) -> str:
    if source is None:
        return "op = ...  # the op under test: import it here"
    module, _, name = source.rpartition(":")
    home = Path(module).parent if module.endswith(".py") else Path.cwd()
    before, first = "", home / module.partition(".")[0]
    if module.endswith(".py") or first.is_dir() or first.with_suffix(".py").is_file():
        place = os.path.relpath(home, folder.resolve())
        module = Path(module).stem if module.endswith(".py") else module
        tail = "" if place == "." else f" / {place!r}"
        before = (
            f"# The folder of {module}, from that of this script.\n"
            f"sys.path.insert(0, str(Path(__file__).resolve().parent{tail}))\n"
        )
    return f"{before}op = importlib.import_module({module!r}).{name}  # the op under test"


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
    """What `compiled_attn.testing.kit.checks.neighbours` makes nan, for each request."""
    each = []
    for request in range(len(step.requests)):
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
    if scene.step.strided or scene.step.gaps:
        yield widened
