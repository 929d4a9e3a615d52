"""The command `python -m compiled_attn.testing fuzz`: random traces until something fails."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

from compiled_attn.testing.fuzz.generate import generate, random_settings
from compiled_attn.testing.fuzz.runner import Failure, run
from compiled_attn.testing.fuzz.shrink import script, shrink
from compiled_attn.testing.fuzz.target import Target
from compiled_attn.testing.fuzz.trace import Trace, TraceError
from graphs.cli.errors import BAD_INPUT, FAILED, UserError, print_error, refuse_unwritable
from graphs.files import write_whole

__all__ = ["run_command"]

TARGETS = {
    "ours": "compiled_attn.testing.fuzz.ours:Ours",
    "transformers": "compiled_attn.testing.fuzz.transformers_batching:TransformersBatching",
    "vllm": "compiled_attn.testing.fuzz.vllm_cpu:VllmCpu",
}
_EVERY_S = 5.0  # between lines of progress
_REFUSED = 1000  # requests in a row, after which the target refuses all


@dataclass
class _Fuzzed:
    """Counts and failures so far; ``start`` is the seed of the first trace."""

    start: int
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def line(self) -> str:
        counts = self.counts
        rate = counts["steps"] / self.seconds if self.seconds else 0.0
        return (
            f"{counts['traces']:,} traces (next seed {self.start + counts['traces']}), "
            f"{counts['requests']:,} requests, {counts['operations']:,} operations, "
            f"{counts['steps']:,} steps ({rate:.0f}/s), {counts['tokens']:,} tokens, "
            f"{len(self.failures)} failures"
        )


class _Sum:
    """Counts of runs in a file, to which those of this run are added."""

    def __init__(self, path: Path | None, target: str) -> None:
        self._path, self._target, self._before = path, target, _read_sum(path, target)

    @property
    def next_seed(self) -> int:
        found: int = self._before.get("next_seed", 0)
        return found

    def write(self, found: _Fuzzed) -> None:
        """Replaces the file, so that a run that is killed loses the last seconds only."""
        if self._path is None:
            return
        before = self._before
        value = {
            "target": self._target,
            "next_seed": found.start + found.counts["traces"],
            "runs": before.get("runs", 0) + 1,
            "failures": before.get("failures", 0) + len(found.failures),
            "counts": dict(Counter(before.get("counts", {})) + found.counts),
            "seconds": round(before.get("seconds", 0) + found.seconds),
        }
        try:
            write_whole(self._path, _json(value).encode())
        except OSError as error:
            raise UserError(f"cannot write {self._path}: {error}") from error


class _Maker:
    """Creates targets of a class; reuses one for the next trace if the settings are equal."""

    def __init__(self, kind: type[Target], options: Mapping[str, Any]) -> None:
        self.kind, self.options = kind, options
        self._idle: Target | None = None

    def run(self, trace: Trace, counts: Counter[str] | None = None) -> Failure | None:
        """Runs a trace on a new target, or on one that was reset."""
        target, self._idle = self._idle, None
        try:
            if target is not None and target.settings != trace.settings:
                target.close()
                target = None
            if target is None:
                target = self.create(trace)
            found = run(trace, target, counts)
            if found is None and target.reset():
                self._idle, target = target, None
            return found
        finally:
            if target is not None:
                target.close()

    def create(self, trace: Trace) -> Target:
        try:
            return self.kind(trace.settings, **self.options)
        except Exception as error:
            name = self.kind.__name__
            raise UserError(f"cannot create {name} with {trace.settings}: {error}") from error

    def close(self) -> None:
        if self._idle is not None:
            self._idle.close()

    def script(self, trace: Trace, failure: Failure) -> str:
        return script(trace, self.kind, self.options, str(failure))


def run_command(argv: Sequence[str] | None = None) -> int:
    """Parses the arguments and fuzzes.

    Returns the exit code: 0: no failure, 1: a failure, 2: bad input.
    """
    options = _arguments(argv)
    try:
        return _fuzz(options)
    except UserError as error:
        return print_error(error, BAD_INPUT, "compiled_attn.testing")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m compiled_attn.testing fuzz",
        description="Run random traces of requests on an engine, check every token, and shrink a "
        "failure to a minimal script. Exits with 1 on a failure, 2 on bad input.",
    )
    add = parser.add_argument
    add(
        "--target",
        default="ours",
        metavar="NAME",
        help=f"engine to test: {', '.join(TARGETS)} or module:Class, a subclass of Target "
        "(default: ours, this project's engine)",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="argument of the target's constructor; JSON, else a string",
    )
    add(
        "--requests",
        type=int,
        metavar="N",
        help="stop after N requests (default: 1000, if no other limit is given)",
    )
    add("--steps", type=int, metavar="N", help="stop after N steps")
    add("--minutes", type=float, metavar="M", help="stop after M minutes")
    add("--seed", type=int, default=0, metavar="S", help="seed of the first trace (default: 0)")
    add("--size", type=int, default=200, metavar="N", help="requests per trace (default: 200)")
    add(
        "--keep",
        type=int,
        metavar="N",
        help="traces per engine, all with its settings (default: 1; vllm: 5)",
    )
    add("--failures", type=int, default=1, metavar="N", help="stop after N failures (default: 1)")
    add(
        "--runs",
        type=int,
        default=500,
        metavar="N",
        help="maximum number of runs to shrink a failing trace (default: 500)",
    )
    add(
        "--without",
        action="append",
        default=[],
        metavar="KIND",
        help="leave out something that the target supports: abort, fork, preempt, defragment, "
        "draft, salt, sample; may be repeated",
    )
    add("--replay", type=Path, metavar="FILE", help="run only this trace (JSON)")
    add(
        "--script",
        type=Path,
        metavar="FILE",
        help="write the script of the first failure here (default: print it)",
    )
    add("--json", type=Path, metavar="FILE", help="write counts and failures here")
    add(
        "--sum",
        type=Path,
        metavar="FILE",
        help="add the counts to this file, every few seconds, and continue after its last seed",
    )
    return parser.parse_args(argv)  # fmt: skip


def _check(options: argparse.Namespace) -> None:
    for name in ("requests", "steps", "minutes", "size", "keep", "failures", "runs"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise UserError(f"expected --{name} above 0, got {value}")
    try:
        refuse_unwritable((options.script, options.json, options.sum), None)
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}") from error


def _fuzz(options: argparse.Namespace) -> int:
    _check(options)
    import torch

    torch.set_num_threads(1)  # the models are tiny
    total = _Sum(options.sum, options.target)
    found = _Fuzzed(max(options.seed, total.next_seed))
    with closing(_Maker(_target(options), dict(map(_option, options.set)))) as maker:
        if options.replay is not None:
            trace = _read_trace(options.replay)
            if failure := maker.run(trace, found.counts):
                _report(options, maker, found, trace, failure)
        else:
            _run_traces(options, maker, found, total)
    print(found.line())
    others = {name: n for name, n in sorted(found.counts.items()) if n}
    print(", ".join(f"{name} {n:,}" for name, n in others.items()))
    if options.json is not None:
        report = {"target": options.target, "seed": found.start, "seconds": found.seconds}
        _write(options.json, {**report, "counts": others, "failures": found.failures})
    total.write(found)
    return FAILED if found.failures else 0


def _run_traces(options: argparse.Namespace, maker: _Maker, found: _Fuzzed, total: _Sum) -> None:
    started = shown = time.perf_counter()
    counts, limits = found.counts, {"requests": options.requests, "steps": options.steps}
    keep = options.keep or maker.kind.same_settings
    if not any((options.requests, options.steps, options.minutes)):
        limits["requests"] = 1000
    refused = 0  # in a row
    while True:
        seed = found.start + counts["traces"]
        settings = random_settings(Random(seed // keep), maker.kind)
        trace = generate(seed, maker.kind, options.size, settings)
        new = Counter(traces=1)
        failure = maker.run(trace, new)
        counts += new
        now = time.perf_counter()
        found.seconds = now - started
        if failure is not None:
            _report(options, maker, found, trace, failure, seed)
        if now - shown >= _EVERY_S:
            shown = now
            print(found.line(), file=sys.stderr, flush=True)
            total.write(found)
        is_late = options.minutes is not None and found.seconds >= 60 * options.minutes
        enough = any(limit and counts[name] >= limit for name, limit in limits.items())
        ends = is_late or enough or len(found.failures) >= options.failures
        refused = 0 if new["requests"] else refused + new["refused"]
        if refused >= _REFUSED or (ends and refused == counts["refused"] > 0 == counts["requests"]):
            raise UserError(
                f"expected {options.target} to accept requests, got {refused} refused in a row: "
                f"let it accept some with {settings}, or restrict its block_sizes and longest"
            )
        if ends:
            return


def _report(
    options: argparse.Namespace,
    maker: _Maker,
    found: _Fuzzed,
    trace: Trace,
    failure: Failure,
    seed: int | None = None,
) -> None:
    """Shrinks a failing trace, and writes its script."""
    print(f"seed {seed}: {failure}; shrinking", file=sys.stderr, flush=True)

    def fails(smaller: Trace) -> bool:
        other = maker.run(smaller)
        return other is not None and other.cause == failure.cause

    if fails(trace):
        trace = shrink(trace, fails, options.runs)
        failure = maker.run(trace) or failure
    else:
        print(
            "not shrunk: it passes on a new engine, so earlier traces matter",
            file=sys.stderr,
        )
    text = maker.script(trace, failure)
    if options.script is None or found.failures:
        print(text)
    else:
        options.script.write_text(text)
        print(f"script: {options.script}", file=sys.stderr)
    found.failures.append(
        {"seed": seed, "failure": str(failure), "trace": json.loads(trace.to_json())}
    )


def _target(options: argparse.Namespace) -> type[Target]:
    name: str = options.target
    module, _, attribute = TARGETS.get(name, name).partition(":")
    if not attribute:
        raise UserError(f"expected --target {', '.join(TARGETS)} or module:Class, got {name!r}")
    try:
        found = getattr(import_module(module), attribute)
    except (Exception, SystemExit) as error:  # of its module
        raise UserError(f"cannot import the target {name}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Target)):
        raise UserError(
            f"expected a subclass of compiled_attn.testing.fuzz.Target, got {name}: subclass it"
        )
    if unknown := {*options.without} - found.supports:
        raise UserError(f"expected --without of {sorted(found.supports)}, got {sorted(unknown)}")
    names = {"supports": found.supports - {*options.without}, "__module__": found.__module__}
    target: type[Target] = type(found.__name__, (found,), names) if options.without else found
    return target


def _option(text: str) -> tuple[str, Any]:
    key, found, value = text.partition("=")
    if not (found and key.isidentifier()):
        raise UserError(f"expected --set KEY=VALUE, got {text!r}")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def _read_trace(path: Path) -> Trace:
    try:
        return Trace.from_json(path.read_text())
    except (OSError, TraceError) as error:
        raise UserError(f"cannot read the trace {path}: {error}") from error


def _read_sum(path: Path | None, target: str) -> dict[str, Any]:
    if path is None or not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict) or found.get("target") != target:
            raise ValueError(f"expected counts of target {target}")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot add to {path}: {error}: name another file") from error
    return found


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=1) + "\n"


def _write(path: Path, value: Mapping[str, Any]) -> None:
    try:
        path.write_text(_json(value))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error}") from error
