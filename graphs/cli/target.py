"""Targets `MODULE:NAME`: a module or file of the user, and a callable in it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from graphs.cli.errors import UserError, users_code

__all__ = ["Named", "Target", "load_target"]

Named = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:CALLABLE",
        help="Module or .py file, and a function, an nn.Module or its class in it; NAME() is "
        "the result of calling NAME.",
    ),
]


@dataclass(frozen=True)
class Target:
    """A callable and its module."""

    name: str
    callable: Callable[..., Any]
    module: ModuleType


def load_target(text: str) -> Target:
    """Import `MODULE:NAME`.

    `MODULE` is a dotted name or the path of a `.py` file; `NAME` may have dots. `NAME()` is the
    result of calling it. An `nn.Module` class is instantiated without arguments, in eval mode.

    Raises:
        UserError: it cannot be found, imported or called, or is not callable.
    """
    from torch import nn

    source, colon, name = text.rpartition(":")
    if not colon or not source or not name:
        raise UserError(f"expected MODULE:NAME, got {text!r}: such as model.py:MyModule")
    module = _import(source)
    with users_code(f"looking up {text}"):
        found = _lookup(module, name.removesuffix("()"))
    if name.endswith("()"):
        with users_code(f"calling {text}"):
            found = found()
    elif isinstance(found, type) and issubclass(found, nn.Module):
        with users_code(f"calling {text}()"):
            found = found().eval()
    if not callable(found):
        raise UserError(
            f"expected {text} to be callable, got a {type(found).__name__}: name a function, an "
            "nn.Module or its class, or a factory followed by ()"
        )
    return Target(text, found, module)


def _import(source: str) -> ModuleType:
    is_file = source.endswith(".py")
    if is_file and not Path(source).is_file():
        raise UserError(f"no such file: {source}")
    with users_code(f"importing {source}"):
        try:
            if is_file:
                return _import_file(Path(source))
            _look_in(Path.cwd())
            return importlib.import_module(source)
        except ModuleNotFoundError as error:
            if error.name and not is_file and source.split(".")[0] == error.name.split(".")[0]:
                raise UserError(
                    f"no module named {error.name}: run where it can be imported, or name its .py "
                    "file"
                ) from error
            raise


def _import_file(path: Path) -> ModuleType:
    path = path.resolve()
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    name = path.stem if loaded is None else f"{path.stem}_{abs(hash(path)):x}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    _look_in(path.parent)
    sys.modules[name] = module  # Dynamo looks globals up by module name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _look_in(folder: Path) -> None:
    # As Python does for a script.
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _lookup(module: ModuleType, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise UserError(f"{module.__name__} has no {name}; it has {_own_callables(module)}")
        found = getattr(found, part)
    return found


def _own_callables(module: ModuleType) -> str:
    own = [
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    return ", ".join(own) or "no callable"
