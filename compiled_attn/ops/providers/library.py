"""A function of a library that may not be installed, or in another version."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__all__ = ["Library"]


@dataclass(frozen=True)
class Library:
    """A function of an optional library, imported when it is first needed.

    Attributes:
        package: the distribution to install.
        module, function: where the function is.
        arguments: the arguments that calls pass.
    """

    package: str
    module: str
    function: str
    arguments: tuple[str, ...]

    def version(self) -> str:
        """Returns the installed version, or why there is none."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return str(self.why_not())

    def call(self, *arguments: Any, **options: Any) -> Any:
        """Calls the function, see `why_not`."""
        function, _ = _load(self)
        return function(*arguments, **options)

    def why_not(self) -> str | None:
        """Returns why the function cannot be called, or None."""
        _, reason = _load(self)
        return reason


@functools.cache
def _load(library: Library) -> tuple[Any, str | None]:
    """The function, and why it cannot be called; imports it once, as a failure takes seconds."""
    try:
        function = getattr(import_module(library.module), library.function)
        takes = inspect.signature(function).parameters
    except ModuleNotFoundError:
        return None, f"is not installed: {library.package}"
    except Exception as error:  # such as of a library built for another torch
        return None, f"cannot be imported: {str(error).partition(chr(10))[0]}"
    lacks = [each for each in library.arguments if each not in takes]
    reason = f"takes no {', '.join(lacks)} in the installed version" if lacks else None
    return function, reason
