"""Compiles several C++ kernels of a graph in one translation unit.

Inductor compiles each kernel by itself, where headers and linking dominate. Here the kernels of a
graph are collected until it waits for them, and compiled into a few libraries.

A kernel that is not one function after torch's header is left to inductor, and so are those of a
unit that does not compile.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from graphs.torch_internals.features import Feature
from graphs.torch_internals.patches import Patch, SharedPatch
from graphs.watch.causes import describe_failure

__all__ = ["SHARED_UNITS", "share_units"]

_log = logging.getLogger(__name__)

# Characters of kernels per unit, which take twice as long as the headers. Independent of the
# machine, since a later start looks for the same libraries.
_UNIT_CHARACTERS = 48_000

_HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>\n"
_PYTHON = """#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sstream>
#include <cstdlib>
#include <cerrno>
"""
_NAME = re.compile(r"\bkernel\b")
_DIRECTIVE = re.compile(r"^\s*#(?!pragma\b)", re.MULTILINE)

_IS_ACTIVE: ContextVar[bool] = ContextVar("kernels share translation units", default=False)


@contextlib.contextmanager
def share_units() -> Iterator[None]:
    """Let kernels that this thread compiles or loads inside share libraries."""
    if not SHARED_UNITS.is_on:
        yield
        return
    before = _IS_ACTIVE.set(True)
    try:
        with _PATCH:
            yield
    finally:
        _IS_ACTIVE.reset(before)


def _probe() -> str:
    from torch._inductor.async_compile import AsyncCompile

    for name, expected in (
        ("cpp_pybinding", ["self", "argtypes", "source_code"]),
        ("wait", ["self", "scope"]),
    ):
        found = [*inspect.signature(getattr(AsyncCompile, name)).parameters]
        if found[: len(expected)] != expected:
            return f"AsyncCompile.{name} takes {', '.join(found)}"
    _source_of([_Kernel(["const float*", "int64_t"], "", object)])
    return ""


SHARED_UNITS = Feature(
    "shared_units",
    gain="Several kernels share a translation unit: headers and linking dominate compile time.",
    fallback="Every kernel is a library of its own.",
    versions="2.11 to 2.15",
    files=("graphs/torch_internals/kernel_units.py",),
    probe=_probe,
)


class _Kernel(NamedTuple):
    """A kernel that is not compiled yet.

    Attributes:
        types: of its arguments, in C++.
        body: its source after torch's header.
        alone: starts to compile it as inductor does.
    """

    types: Sequence[str]
    body: str
    alone: Callable[[], Any]


def _replacements() -> list[Patch]:
    from torch._inductor.async_compile import AsyncCompile, kernel_code_log

    inductor: Any = AsyncCompile
    bind, wait = inductor.cpp_pybinding, inductor.wait

    @functools.wraps(bind)
    def gather(self: Any, argtypes: Sequence[str], source_code: str, *others: Any) -> Any:
        alone = functools.partial(bind, self, argtypes, source_code, *others)
        body = _body_of(source_code) if _IS_ACTIVE.get() and not others else None
        if body is None:
            return alone()
        kernel_code_log.info("CPP+Bindings Kernel:\n%s", source_code)
        return _Kernel(argtypes, body, alone)

    @functools.wraps(wait)
    def load_and_wait(self: Any, scope: dict[str, Any]) -> None:
        kernels = {name: each for name, each in scope.items() if isinstance(each, _Kernel)}
        units = _split(kernels)
        waits = [_start([*unit.values()], self) for unit in units]
        for unit, functions in zip(units, waits, strict=True):
            scope.update(zip(unit, functions(), strict=True))
        wait(self, scope)

    return [
        Patch(inductor, "cpp_pybinding", gather),
        Patch(inductor, "wait", load_and_wait),
    ]


_PATCH = SharedPatch(lambda: _replacements())


def _body_of(source: str) -> str | None:
    """The source after torch's header, if it is one function `kernel` without directives."""
    before, header, body = source.partition(_HEADER)
    is_known = header and not before.strip() and not _DIRECTIVE.search(body)
    return body if is_known and len(_NAME.findall(body)) == 1 else None


def _split(kernels: Mapping[str, _Kernel]) -> list[dict[str, _Kernel]]:
    total = sum(map(_size, kernels.values()))
    units: list[dict[str, _Kernel]] = [{} for _ in range(total // _UNIT_CHARACTERS + 1)]
    for name, kernel in sorted(kernels.items(), key=lambda each: -_size(each[1])):
        min(units, key=lambda unit: sum(map(_size, unit.values())))[name] = kernel
    return [unit for unit in units if unit]


def _size(kernel: _Kernel) -> int:
    return len(kernel.body)


def _start(unit: Sequence[_Kernel], inductor: Any) -> Callable[[], list[Any]]:
    """Start to compile a unit, in the background if inductor has threads for that.

    Returns:
        A function that waits for the kernels; some may be futures that inductor waits for.
    """
    from torch._inductor.async_compile import get_compile_threads
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    if len(unit) == 1:
        kernel = unit[0].alone()
        return lambda: [kernel]
    submit = inductor.submit if get_compile_threads() > 1 else None
    try:
        load = CppPythonBindingsCodeCache.load_async(_source_of(unit), submit_fn=submit)
    except Exception as error:
        return _one_by_one(unit, error)

    def loaded() -> list[Any]:
        try:
            return _functions_of(load(), len(unit))
        except Exception as error:
            return _one_by_one(unit, error)()

    return loaded


def _one_by_one(unit: Sequence[_Kernel], error: Exception) -> Callable[[], list[Any]]:
    _log.warning("kernels are compiled one by one: %s", describe_failure(error))
    return lambda: [each.alone() for each in unit]


def _source_of(unit: Sequence[_Kernel]) -> str:
    """The source of a unit: each kernel with its binding in its own namespace."""
    parts = [_HEADER, _PYTHON]
    for name, each in zip(_names(len(unit)), unit, strict=True):
        function = _NAME.sub(name, each.body)
        parts.append(f"namespace of_{name} {{\n{function}\n{_binding(name, each.types)}\n}}\n")
    return "".join(parts)


def _names(count: int) -> list[str]:
    """Names of the kernels of a unit; inductor looks up the first by its usual name."""
    return ["kernel", *(f"kernel_{i}" for i in range(1, count))]


def _binding(name: str, types: Sequence[str]) -> str:
    """The Python module of a kernel, as inductor writes it."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Inductor

    bare = (each.replace("const ", "") for each in types)
    args = ", ".join(f"parse_arg<{each}>(args, {place})" for place, each in enumerate(bare))
    call = Inductor.call_entry_function.format(args).replace("kernel", name, 1)
    return Inductor.suffix_template.format(
        arg_len=len(types), call_entry_func=call, entry_func=name, extra_parse_arg=""
    )


def _functions_of(library: Any, count: int) -> list[Any]:
    """The kernels of a library, of which only the first module is loaded."""
    first, *others = _names(count)
    functions = [getattr(library, first)]
    for name in others:
        spec = importlib.util.spec_from_file_location(f"{library.key}.{name}", library.__file__)
        if spec is None or spec.loader is None:
            raise ImportError(f"{library.__file__} is not known as a library")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules.pop(spec.name, None)  # inductor clears only its own modules
        functions.append(getattr(module, name))
    return functions
