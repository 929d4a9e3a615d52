"""Functions of loaded modules, and their code as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from graphs.files import short_digest

__all__ = [
    "code_of",
    "code_text",
    "function_in",
    "functions_of",
    "is_code_of",
    "names_of",
]


def code_of(module: ModuleType) -> str:
    """Digest of the functions of a module as it was loaded, and those of its classes."""
    return short_digest("\n".join(code_text(each.__code__) for each in functions_of(module)))


def is_code_of(module: ModuleType, file: Path) -> bool:
    """Whether all functions that a module defines are in a source file as it is now."""
    try:
        code = compile(file.read_bytes(), file, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError):
        return False
    texts = {code_text(each) for each in _codes_in(code)}
    own = str(getattr(module, "__file__", ""))
    codes = (each.__code__ for each in functions_of(module) if each.__code__.co_filename == own)
    return all(code_text(each) in texts for each in codes)


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes_in(each)


def functions_of(module: ModuleType) -> Iterator[FunctionType]:
    """The functions that a module defines, and those of its classes."""
    for value in [*vars(module).values()]:
        values: Iterable[Any] = (value,)
        if isinstance(value, type):
            values = vars(value).values() if value.__module__ == module.__name__ else ()
        for each in map(function_in, values):
            if each is not None and each.__globals__ is vars(module):
                yield each


def function_in(value: Any) -> FunctionType | None:
    """The function of a method or property, as a class has it; None of anything else."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    return value if isinstance(value, FunctionType) else None


def names_of(code: CodeType) -> set[str]:
    """Names of globals and attributes that code uses, that of inner functions included."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(names_of, inner))


def code_text(code: CodeType) -> str:
    """Code as a text that is the same in each process."""
    constants = []
    for each in code.co_consts:
        if isinstance(each, CodeType):
            constants.append(code_text(each))
        else:  # the order in a set differs between processes
            constants.append(repr(sorted(map(repr, each)) if isinstance(each, frozenset) else each))
    names = code.co_names, code.co_varnames, code.co_freevars
    return f"{code.co_code.hex()} {names} {constants}"
