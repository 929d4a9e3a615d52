"""Source files of modules: where they are, what they import, and what of it live code can use."""

from __future__ import annotations

import ast
import functools
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

__all__ = [
    "Import",
    "SourceFile",
    "file_of",
    "is_own",
    "live_imports",
    "package_of",
    "parse_source",
    "read_source",
]

_NEVER = "<not run on import>"
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_COMPOUND = (ast.stmt, ast.ExceptHandler, ast.match_case)
_OPTIONAL = {"ImportError", "ModuleNotFoundError", "Exception", ""}


_Part: TypeAlias = tuple[str, bool, ast.AST]


@dataclass(frozen=True)
class Import:
    """An import statement.

    Attributes:
        targets: the modules that it may import: `from a import b` is `a` and `a.b`.
        bound: the names that it gives to the file; `*` for all.
        scope: the function or class at the top of the file that it is in; empty: in none.
        is_optional: whether the file goes on where it fails.
    """

    targets: tuple[str, ...]
    bound: frozenset[str]
    scope: str
    is_optional: bool


@dataclass
class SourceFile:
    """A source file as its imports see it.

    Attributes:
        imports: all of them, also those inside functions.
        mentions: the identifiers that the code of each function and class at the top of the file
            mentions, and under the empty name those of the code outside of them.
        registered: functions and classes with decorators, which may hand them to anyone.
    """

    imports: list[Import] = field(default_factory=list)
    mentions: dict[str, set[str]] = field(default_factory=lambda: {"": set()})
    registered: set[str] = field(default_factory=set)


@functools.lru_cache(maxsize=4096)
def read_source(name: str, file: str, changed: int, size: int) -> SourceFile:
    """The source of a module; `changed` and `size` distinguish its versions."""
    return parse_source(package_of(name, file), Path(file).read_bytes()) or SourceFile()


def package_of(name: str, file: str) -> str:
    """The package of a module, which its relative imports begin at."""
    return name if file.endswith("__init__.py") else name.rpartition(".")[0]


def parse_source(package: str, text: bytes) -> SourceFile | None:
    """The source of a module of a package, by its text; None where it cannot be parsed now."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):  # for another Python: this cannot import it
        return None
    source = SourceFile()
    for scope, is_optional, part in _parts(tree):
        names = source.mentions.setdefault(scope, set())
        if isinstance(part, _DEFINITIONS) and part.decorator_list:
            source.registered.add(part.name)
        for node in _nodes(part):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                bound = {alias.asname or alias.name.partition(".")[0] for alias in node.names}
                targets = tuple(_targets(node, package))
                source.imports.append(Import(targets, frozenset(bound), scope, is_optional))
            elif (mentioned := _identifier(node)) and scope != _NEVER:
                names.add(mentioned)
    return source


def live_imports(
    files: Mapping[str, SourceFile], entries: Iterable[tuple[str, str]]
) -> Iterator[Import]:
    """The imports that live code can use.

    Live is what runs when a file is imported, `entries` (a module, and the function or class in
    it), and every function and class that live code of any of the files mentions by its name. An
    import inside of a function is live if the function is; one that may fail, if its name is
    mentioned; any other always.
    """
    live, mentioned = set(entries), {name for _, name in entries}
    while True:
        before = len(live)
        for module, source in files.items():
            for scope, names in source.mentions.items():
                is_live = not scope or scope in source.registered or scope in mentioned
                if (module, scope) in live or is_live:
                    live.add((module, scope))
                    mentioned |= names
        if len(live) == before:
            break
    for module, source in files.items():
        for each in source.imports:
            is_used = (
                not each.is_optional or "*" in each.bound or not mentioned.isdisjoint(each.bound)
            )
            if (module, each.scope) in live and is_used:
                yield each


def _parts(node: ast.AST, scope: str = "", is_optional: bool = False) -> Iterator[_Part]:
    """The code of a file in parts: the scope of each, and whether an import in it may fail."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _DEFINITIONS):
            head = child.bases if isinstance(child, ast.ClassDef) else [child.args]
            yield child.name, False, child
            yield from (("", False, part) for part in (*child.decorator_list, *head))  # on import
        elif isinstance(child, ast.If) and _is_never(child.test):
            yield from _parts(ast.Module(child.body, []), _NEVER)
            yield from _parts(ast.Module(child.orelse, []), scope, is_optional)
        elif isinstance(child, _COMPOUND) and not isinstance(child, (ast.Import, ast.ImportFrom)):
            is_try = isinstance(child, ast.Try) and any(map(_catches_import, child.handlers))
            if not _is_list_of_names(child):
                yield from _parts(child, scope, is_optional or is_try)
        else:
            yield scope, is_optional, child


def _nodes(part: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it, in half of the time of `ast.walk`."""
    todo = [part]
    while todo:
        node = todo.pop()
        yield node
        for value in vars(node).values():
            if isinstance(value, list):
                todo += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                todo.append(value)


def _targets(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    parts = package.split(".")[: len(package.split(".")) - max(0, node.level - 1)]
    base = ".".join([*(parts if node.level else []), *filter(None, [node.module])])
    yield base
    yield from (f"{base}.{alias.name}" for alias in node.names)


def _identifier(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return "" if isinstance(node.ctx, ast.Store) else node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    # As in getattr(module, "name") and in annotations.
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, str) and value.isidentifier() else ""


def _is_never(test: ast.expr) -> bool:
    return ast.unparse(test) in ("__name__ == '__main__'", "TYPE_CHECKING", "typing.TYPE_CHECKING")


def _is_list_of_names(node: ast.AST) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)


def _catches_import(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any((_identifier(kind) if kind else "") in _OPTIONAL for kind in kinds)


def is_own(name: str) -> bool:
    """Whether a module has a source file outside of Python and its installed packages."""
    if name.partition(".")[0] in sys.stdlib_module_names or _is_installed(_loaded_file(name)):
        return False
    file = file_of(name)
    return file is not None and not _is_installed(str(file))


def file_of(name: str) -> Path | None:
    """The source of a module, also of one in a loaded package that is not imported yet."""
    if name in sys.modules:
        file = getattr(sys.modules[name], "__file__", None)
        return Path(file) if file and file.endswith(".py") and os.path.isfile(file) else None
    package, _, last = name.rpartition(".")
    above = file_of(package) if package else None
    if above is None or above.name != "__init__.py":
        return None
    places = (above.with_name(f"{last}.py"), above.parent / last / "__init__.py")
    return next((place for place in places if place.is_file()), None)


def _loaded_file(name: str) -> str:
    """The file of a module, or of the package that it would be in; empty if none is loaded."""
    while name and name not in sys.modules:
        name = name.rpartition(".")[0]
    return getattr(sys.modules.get(name), "__file__", None) or ""


@functools.lru_cache(maxsize=8192)
def _is_installed(file: str) -> bool:
    return any(Path(file).is_relative_to(folder) for folder in _folders())


@functools.lru_cache(maxsize=1)
def _folders() -> list[str]:
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("purelib", "platlib", "stdlib", "platstdlib")]
    return [*folders, site.getusersitepackages()]  # what `pip install --user` is for
