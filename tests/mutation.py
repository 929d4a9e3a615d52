"""Mutation testing: changes one expression at a time and expects the tests to notice.

    python tests/mutation.py [PATH ..]  # files of mutation.toml whose path contains one of these
    python tests/mutation.py --target corruption  # only what the fuzzer and the sanitizer must find
    python tests/mutation.py --keys FILE  # only the mutants whose keys are lines of a file

Mutants live in a copy of the tree. One process imports torch and pytest once and forks for each
mutant; the child writes the changed file, then runs the tests of that file until one fails.
`mutation.toml` lists files, tests, and why some survivors change nothing. A target may also list
the functions to change (``scopes``), changes by hand, and survivors that are ``harmless`` to it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import hashlib
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, chain
from pathlib import Path
from typing import NamedTuple

import hypothesis
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PAIRS = "Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, Add Sub, Mult FloorDiv, BitAnd BitOr, And Or"
SWAPS = {"Mod": "FloorDiv", "Pow": "Mult", "LShift": "RShift"}
SWAPS |= dict(pair.split() for pair in PAIRS.split(", "))
SWAPS |= {second: first for first, second in [*SWAPS.items()][3:]}


class Mutant(NamedTuple):
    file: str
    line: int
    scope: str
    before: str
    after: str
    source: str
    name: str = ""  # of a change by hand

    @property
    def key(self) -> str:
        if self.name:
            return f"{self.file}: {self.name}"
        # Another line of the function may be replaced by the same.
        before = f"{self.before} -> " if self.after in ("pass", "return None") else ""
        return f"{self.file} {self.scope}: {before}{self.after}"


def changes(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yields replacements ``(node, text)`` of a node."""
    match node:
        case ast.Compare():
            for at, operator in enumerate(node.ops):
                yield node, _with(node, ops=[*node.ops[:at], _swap(operator), *node.ops[at + 1 :]])
        case ast.BinOp() | ast.BoolOp() | ast.AugAssign() if type(node.op).__name__ in SWAPS:
            yield node, _with(node, op=_swap(node.op))
        case ast.UnaryOp():
            yield node, f"({ast.unparse(node.operand)})"
        case ast.Constant(value=int(value)):
            yield node, str(not value if isinstance(value, bool) else value + 1)
        case ast.Return(value=ast.expr()) if not isinstance(node.value, ast.Constant):
            yield node, "return None"
    match node:
        case ast.Raise() | ast.Break() | ast.Continue() | ast.Delete() | ast.AugAssign():
            yield node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield node, "pass"  # without a plain name there would be a NameError
        case ast.Expr(value=ast.Call()) if not ast.unparse(node).startswith("_log."):
            yield node, "pass"
    for test in (getattr(node, "test", None), *getattr(node, "ifs", ())):
        if test is not None and not isinstance(test, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
            yield test, f"(not {ast.unparse(test)})"


def _swap(operator: ast.AST) -> ast.AST:
    return getattr(ast, SWAPS[type(operator).__name__])()


def _with(node: ast.AST, **fields: object) -> str:
    changed = copy.copy(node)
    vars(changed).update(fields)
    text = ast.unparse(changed)
    return f"({text})" if isinstance(node, ast.expr) else text


def walk(node: ast.AST, scope: str = "") -> Iterator[tuple[ast.AST, str, str]]:
    """Yields the replacements ``(node, text, function)`` of a tree; not of types and messages."""
    yield from ((*change, scope) for change in changes(node))
    match node:
        case ast.JoinedStr() | ast.Raise() | ast.keyword(arg="strict"):  # strict=: of zip
            children = []
        case ast.FunctionDef():
            children = [*node.args.defaults, *node.args.kw_defaults, *node.body]
        case ast.ClassDef():
            children = node.body
        case ast.AnnAssign():
            children = [node.value]
        case _:
            children = [*ast.iter_child_nodes(node)]
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        scope = f"{scope}.{node.name}".lstrip(".")
    for child in filter(None, children):
        yield from walk(child, scope)


def mutants_of(file: str) -> Iterator[Mutant]:
    data = (ROOT / file).read_bytes()
    starts = [0, *accumulate(map(len, data.splitlines(keepends=True)))]
    seen = set()
    for node, text, scope in walk(ast.parse(data)):
        start, stop = starts[node.lineno - 1], starts[node.end_lineno]
        end = starts[node.end_lineno - 1] + node.end_col_offset
        new = data[start : start + node.col_offset] + text.encode() + data[end:stop]
        source = (data[:start] + new + data[stop:]).decode()
        before, after = (" ".join(lines.decode().split()) for lines in (data[start:stop], new))
        mutant = Mutant(file, node.lineno, scope, before, after, source)
        if mutant.key not in seen and before != after:
            seen.add(mutant.key)
            yield mutant


def sample(
    file: str, skipped: list[str], count: int | None, seed: int, scopes: list[str] | None = None
) -> list[Mutant]:
    """Samples by a hash of the key: after a change elsewhere in the file it is the same sample.

    Only functions of ``scopes`` are changed; None: all but the skipped ones.
    """
    found = [*mutants_of(file)]
    if scopes is None:
        mutants = [mutant for mutant in found if mutant.scope not in skipped]
    else:
        mutants = [mutant for mutant in found if mutant.scope in scopes]
        if missing := {*scopes} - {mutant.scope for mutant in mutants}:
            sys.exit(f"expected functions of {file}, got {sorted(missing)}: see mutation.toml")
    mutants.sort(key=lambda each: hashlib.sha256(f"{seed} {each.key}".encode()).digest())
    return sorted(mutants[:count], key=lambda each: each.line)


def changed_by_hand(file: str, name: str, before: str, after: str) -> Mutant:
    """Returns the mutant in which a text that occurs once in a file is replaced."""
    source = (ROOT / file).read_text()
    if source.count(before) != 1:
        sys.exit(f"expected {before!r} once in {file}, got {source.count(before)} for {name!r}")
    line = source[: source.index(before)].count("\n") + 1
    texts = (" ".join(each.split()) for each in (before, after))
    return Mutant(file, line, "", *texts, source.replace(before, after), name)


class FirstFailure:
    """A plugin of pytest that writes the first test that fails to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called after each phase of a test."""
        if report.failed and not self.path.exists():
            self.path.write_text(report.nodeid.partition("::")[2])


def fork_tests(tree: Path, tests: list[str], mutant: Mutant | None) -> int:
    """Returns the id of a new child that runs the tests; its status is 0 if they pass."""
    if pid := os.fork():
        return pid
    status = 99
    try:
        os.setsid()
        os.chdir(tree)
        sys.path.insert(0, str(tree))
        for output in (1, 2):
            os.dup2(os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), output)
        # The run without a mutant leaves the bytecode of all other files.
        sys.dont_write_bytecode = mutant is not None
        os.environ.update(PYTHONPATH=str(tree), PYTHONDONTWRITEBYTECODE="1" if mutant else "")
        if mutant:
            Path(mutant.file).write_text(mutant.source)
            Path(importlib.util.cache_from_source(mutant.file)).unlink(missing_ok=True)
        options = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", f"--basetemp={tree}/tmp"]
        options += ["--hypothesis-profile=mutation"]
        status = int(pytest.main([*options, *tests], plugins=[FirstFailure(tree / "killer")]))
        files = [(name, getattr(each, "__file__", None)) for name, each in sys.modules.items()]
        foreign = [name for name, file in files if file and tree not in Path(file).parents]
        Path("modules").write_text("\n".join(foreign))
    finally:
        os._exit(status)


def poll(pid: int, deadline: float) -> str:
    """Returns the result of a child, and kills what it left; empty while it runs."""
    done, status = os.waitpid(pid, os.WNOHANG)
    if not done and time.monotonic() < deadline:
        return ""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if not done:
        os.waitpid(pid, 0)
        return "timeout"
    return "killed" if status else "survived"


def run(folder: Path, plan: list[tuple], jobs: int) -> Iterator[tuple[Mutant, str, str]]:
    """Yields each mutant of the plan's ``(tests, mutants)``, its result, and which test failed."""
    trees = [folder / str(at) for at in range(jobs)]
    shutil.copytree(ROOT, trees[0], ignore=shutil.ignore_patterns(".*", "__pycache__", "build"))
    work = []
    for tests, mutants in plan:
        begun = time.monotonic()
        pid = fork_tests(trees[0], tests, None)
        while not (result := poll(pid, begun + 600)):
            time.sleep(0.01)
        if result != "survived":
            sys.exit(f"tests fail without a mutant:\n{(trees[0] / 'log').read_text()}")
        limit = 10 + 3 * (time.monotonic() - begun)
        print(f"{len(mutants)} mutants, each at most {limit:.0f} s in {' '.join(tests)}")
        work += [(mutant, tests, limit) for mutant in mutants]
        for module in (trees[0] / "modules").read_text().split():
            with contextlib.suppress(Exception):
                importlib.import_module(module)
    for tree in trees[1:]:
        shutil.copytree(trees[0], tree, ignore=shutil.ignore_patterns("tmp"))
    running = {}
    try:
        while work or running:
            for tree in trees:
                if tree not in running and work:
                    mutant, tests, limit = work.pop(0)
                    original = (tree / mutant.file).read_text()
                    pid = fork_tests(tree, tests, mutant)
                    running[tree] = pid, time.monotonic() + limit, mutant, original
                if tree in running and (result := poll(*running[tree][:2])):
                    _, _, mutant, original = running.pop(tree)
                    (tree / mutant.file).write_text(original)
                    killer = tree / "killer"
                    yield mutant, result, killer.read_text() if killer.exists() else ""
                    killer.unlink(missing_ok=True)
            time.sleep(0.01)
    finally:
        for pid, *_ in running.values():
            poll(pid, 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", help="parts of paths of files to change; default: all")
    parser.add_argument("--target", help="only targets whose name begins so; default: `make` ones")
    parser.add_argument("--mutants", type=int, default=12, help="per file")
    parser.add_argument("--seed", type=int, default=0, help="samples other mutants")
    parser.add_argument("--keys", type=Path, help="only mutants whose keys are lines of this file")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    keys = None if options.keys is None else {*options.keys.read_text().splitlines()}
    settings = tomllib.loads((ROOT / "tests/mutation.toml").read_text())
    plan, explained = [], {*settings["equivalent"]}
    count = None if keys else options.mutants
    for name, target in settings["target"].items():
        is_chosen = name.startswith(options.target) if options.target else "scopes" not in target
        paths, scopes = options.paths or [""], target.get("scopes", {})
        files = [f for f in target.get("files", scopes) if any(path in f for path in paths)]
        if not (is_chosen and files):
            continue
        sampled = [
            sample(f, settings["skipped"], count, options.seed, scopes.get(f)) for f in files
        ]
        by_hand = [each for each in target.get("by_hand", ()) if each["file"] in files]
        mutants = [*(changed_by_hand(**each) for each in by_hand), *chain.from_iterable(sampled)]
        if keys is not None:
            mutants = [mutant for mutant in mutants if mutant.key in keys]
        if mutants:
            plan.append((target["tests"], mutants))
        explained |= {*target.get("harmless", ())}
    sys.stdout.reconfigure(line_buffering=True)
    os.environ.update(TORCHINDUCTOR_COMPILE_THREADS="1", TORCH_WARM_POOL="0")
    torch.set_num_threads(1)  # no threads before a fork
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]  # a failure is not shrunk
    quick = {"deadline": None, "derandomize": True, "max_examples": 40}
    hypothesis.settings.register_profile("mutation", phases=phases, **quick)
    total, killed, killers, unexplained = Counter(), Counter(), Counter(), 0
    with tempfile.TemporaryDirectory() as folder:
        for mutant, result, killer in run(Path(folder), plan, options.jobs):
            total[mutant.file] += 1
            killed[mutant.file] += result != "survived"
            killers[killer.partition("[")[0] or result] += 1
            what = mutant.name or f"{mutant.before}  ->  {mutant.after}"
            print(f"{result:8} {mutant.file}:{mutant.line}  {what}  {killer and f'({killer})'}")
            if result == "survived" and mutant.key not in explained:
                unexplained += 1
                print(f"not explained: '{mutant.key}'")
    for file in total:
        print(f"{file:50} {killed[file]:4} of {total[file]:4} killed")
    if options.target:
        print(*(f"{count:4} {killer}" for killer, count in killers.most_common()), sep="\n")
    share = killed.total() / total.total()
    print(f"{killed.total()} of {total.total()} killed: {share:.1%}; {unexplained} not explained")
    return int(share < 0.95 or unexplained > 0)


if __name__ == "__main__":
    sys.exit(main())
