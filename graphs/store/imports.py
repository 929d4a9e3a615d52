"""Imports that the text of a source file names, without running or parsing it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["WHOLE", "Imports", "imports_in"]

WHOLE = ".*"
"""Ends the name of a module, or of a name in one, that code can use with all that it exposes."""

# Also matches imports in comments and strings, whose words rarely name a module.
_GAP = rb"(?:[ \t]|\\\r?\n)*"
_IMPORT = re.compile(
    rb"(?:from%b([.\w]+?)%bimport|import)\b%b" % (_GAP, _GAP, _GAP)
    + rb"(\((?:#[^\n]*|[\w\s,.*\\])*\)|(?:\\\r?\n|[^#\n;])*)"
)
_COMMENT = re.compile(rb"#[^\n]*")
_NAME = re.compile(rb"([\w.]+)(?:\s+as\s+(\w+))?")
_FOR_TYPES = re.compile(
    rb"^([ \t]*)if[ \t]+(?:\w+\.)?TYPE_CHECKING[ \t]*:[ \t]*(?:#[^\n]*)?\n"
    rb"((?:\1[ \t]+[^\n]*(?:\n|\Z)|\1\)[^\n]*(?:\n|\Z)|[ \t\r]*\n)*)",
    re.MULTILINE,
)


class Imports(NamedTuple):
    """What a source file imports: names of modules, and names in them that end in `WHOLE`.

    Attributes:
        run: wherever the file does it, at the top or inside a function.
        for_types: by the name that they bind, those under `if TYPE_CHECKING:`, which never run. A
            package that imports its names on first access lists them so.
    """

    run: tuple[str, ...]
    for_types: dict[str, tuple[str, ...]]


def imports_in(text: bytes, package: str) -> Imports:
    """Imports of source code in `package`: `from a import b` is `a` and all of `a.b`."""
    for_types: dict[str, tuple[str, ...]] = {}
    for match in _FOR_TYPES.finditer(text):
        for name, modules in _imports(match[2], package):
            for_types[name] = (*for_types.get(name, ()), *modules)
    run = (module for _, names in _imports(_FOR_TYPES.sub(b"", text), package) for module in names)
    return Imports(tuple(dict.fromkeys(run)), for_types)


def _imports(text: bytes, package: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each name that imports bind, with the modules that it comes from."""
    for base, names in _IMPORT.findall(text):
        parts = (_NAME.search(part) for part in _COMMENT.sub(b"", names).split(b","))
        found = [(_text(part[1]), _text(part[2] or part[1])) for part in parts if part]
        if not base:
            for name, bound in found:
                above = name.split(".")
                yield bound, tuple(f"{'.'.join(above[: i + 1])}{WHOLE}" for i in range(len(above)))
            continue
        absolute = _text(base).lstrip(".")
        if level := len(base) - len(base.lstrip(b".")):
            above = package.split(".")
            above = above[: len(above) - level + 1]
            absolute = ".".join([*above, *filter(None, [absolute])])
        if not found:  # all names
            yield "*", (absolute + WHOLE,)
        for name, bound in found:
            yield bound, (absolute, f"{absolute}.{name}{WHOLE}")


def _text(name: bytes) -> str:
    return name.decode(errors="replace")
