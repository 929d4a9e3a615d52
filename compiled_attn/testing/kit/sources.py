"""Copies functions, and what they name, into a script."""

from __future__ import annotations

import ast
import dis
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from types import CodeType, ModuleType
from typing import Any

__all__ = ["Sources"]

_OURS = "compiled_attn.testing"


class Sources:
    """The sources of functions, and of what they name in the kit and in their own modules.

    Args:
        reserved: names that the script uses itself; a function with such a name gets another one.
        header: what the script imports, by name.
    """

    def __init__(self, reserved: Collection[str], header: Mapping[str, Any]) -> None:
        self._header = header
        self._objects: dict[str, Any] = dict.fromkeys(reserved) | dict(header)
        self._texts: dict[str, str] = {}

    def add(self, function: Callable[..., Any], name: str | None = None) -> str:
        """Adds a function, under a reserved name if given, and what it names before it.

        Returns its name in the script.
        """
        code, own, known = function.__code__, function.__name__, function.__globals__
        if name is not None:
            del self._objects[name]
        name, is_new = self._named(name or own, function)
        if not is_new:
            return name
        text = textwrap.dedent(inspect.getsource(function)).removeprefix("@staticmethod\n")
        renamed = {own: name}
        for each in [*_names(code), *_defaults(text)]:
            if each in known and known[each] is not function:
                renamed[each] = self._add(each, known[each], function.__module__)
        text = _first_line_of_docstring(text).replace(" -> Arguments:", ":")
        text = re.sub(r"  # (type: ignore.*|fmt: skip)$", "", text, flags=re.MULTILINE)
        for old, new in renamed.items():
            if old != new:  # not attributes and keywords
                text = re.sub(rf"(?<![.\w]){old}\b(?!\s*=[^=])", new, text)
        self._texts[name] = f"\n{text}\n"
        return name

    def texts(self) -> Iterator[str]:
        """Yields the sources, each after what it names."""
        yield from self._texts.values()

    def _add(self, name: str, value: Any, module: str) -> str:
        """Adds a global of a function of a module."""
        home = getattr(value, "__module__", None) or ""
        if inspect.isfunction(value) and (home.startswith(_OURS) or home == module):
            return self.add(value)
        name, is_new = self._named(name, value)
        if not is_new:
            return name
        if isinstance(value, ModuleType):
            self._texts[name] = f"import {value.__name__} as {name}\n"
        elif home and hasattr(value, "__qualname__"):
            self._texts[name] = f"from {home} import {value.__qualname__} as {name}\n"
        else:
            self._texts[name] = f"{name} = {value!r}\n\n"
        return name

    def _named(self, name: str, value: Any) -> tuple[str, bool]:
        """Returns the name of an object in the script, and whether it is new there."""
        while name in self._objects and self._objects[name] is not value:
            name += "_"
        is_new = name not in self._objects
        self._objects[name] = value
        return name, is_new


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


def _defaults(source: str) -> Iterator[str]:
    """Names in the defaults of the parameters of a function."""
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    for default in (*function.args.defaults, *function.args.kw_defaults):
        if default is not None:
            yield from (each.id for each in ast.walk(default) if isinstance(each, ast.Name))
