"""Shrinks a failing trace: fewer operations, then smaller requests and sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from compiled_attn.testing.fuzz.target import Target
from compiled_attn.testing.fuzz.trace import Operation, Settings, Trace

__all__ = ["script", "shrink"]


def shrink(trace: Trace, fails: Callable[[Trace], bool], max_runs: int = 500) -> Trace:
    """Returns the smallest trace found that still fails, the same for the same arguments.

    Delta debugging over the operations, then over prompts, lengths and settings, until nothing
    smaller fails.

    Args:
        trace: a failing trace.
        fails: runs a trace on a new target; returns whether it fails in the same way.
        max_runs: maximum calls of ``fails``.
    """
    shrinker = _Shrinker(fails, max_runs)
    while True:
        before = trace
        trace = shrinker.fewer_operations(trace)
        trace = shrinker.merge_steps(trace)
        trace = shrinker.simpler_operations(trace)
        trace = shrinker.smaller_settings(trace)
        if trace == before or not shrinker.runs_left:
            return trace


class _Shrinker:
    def __init__(self, fails: Callable[[Trace], bool], max_runs: int) -> None:
        self._fails = fails
        self._known: dict[Trace, bool] = {}
        self.runs_left = max_runs

    def fails(self, trace: Trace) -> bool:
        if trace not in self._known:
            if self.runs_left <= 0:
                return False
            self.runs_left -= 1
            self._known[trace] = self._fails(trace)
        return self._known[trace]

    def fewer_operations(self, trace: Trace) -> Trace:
        """Removes ranges of operations: halves first, single ones last, from the end backwards."""
        size = len(trace.operations)
        while size := (size + 1) // 2 if size > 1 else 0:
            end = len(trace.operations)
            while end > 0:
                start = max(0, end - size)
                rest = trace.operations[:start] + trace.operations[end:]
                if self.fails(smaller := replace(trace, operations=rest)):
                    trace = smaller
                end = start
        return trace

    def merge_steps(self, trace: Trace) -> Trace:
        """Merges consecutive step operations."""
        merged: list[Operation] = []
        for each in trace.operations:
            if merged and each.kind == merged[-1].kind == "step":
                each = replace(each, count=each.count + merged.pop().count)
            merged.append(each)
        smaller = replace(trace, operations=tuple(merged))
        return smaller if smaller != trace and self.fails(smaller) else trace

    def simpler_operations(self, trace: Trace) -> Trace:
        for at in range(len(trace.operations)):
            trace = self._descend(trace, lambda one, at=at: _with(one, at))  # type: ignore[misc]
        return trace

    def smaller_settings(self, trace: Trace) -> Trace:
        return self._descend(
            trace, lambda one: (replace(one, settings=s) for s in _smaller_settings(one.settings))
        )

    def _descend(self, trace: Trace, smaller: Callable[[Trace], Iterator[Trace]]) -> Trace:
        """Takes the first smaller trace that fails, until none does."""
        while (found := next(filter(self.fails, smaller(trace)), None)) is not None:
            trace = found
        return trace


def _with(trace: Trace, at: int) -> Iterator[Trace]:
    """Yields the trace with simpler variants of one operation."""
    for operation in _simpler(trace.operations[at]):
        changed = (*trace.operations[:at], operation, *trace.operations[at + 1 :])
        yield replace(trace, operations=changed)


def _simpler(operation: Operation) -> Iterator[Operation]:
    kind, prompt = operation.kind, operation.prompt
    for count in _less(operation.count, 2 if kind == "fork" else 1):
        yield replace(operation, count=count)
    if kind == "fork":
        yield replace(operation, kind="submit", count=1)
    if kind == "share":
        yield replace(operation, kind="submit", of=0, keep=0)
    if operation.salt is not None:
        yield replace(operation, salt=None)
    if operation.seed is not None:
        yield replace(operation, seed=None)
    for keep in _less(operation.keep, 0):
        yield replace(operation, keep=keep)
    for new in _less(operation.new_tokens, 1) if operation.new_tokens else ():
        yield replace(operation, new_tokens=new)
    for length in _less(len(prompt), 1) if prompt else ():
        yield replace(operation, prompt=prompt[:length])
    for at in range(len(prompt) - 1, 0, -1) if len(prompt) <= 16 else ():
        if prompt[at] != prompt[at - 1]:  # one token less, or one that repeats
            yield replace(operation, prompt=prompt[:at] + prompt[at + 1 :])
            yield replace(operation, prompt=(*prompt[:at], prompt[at - 1], *prompt[at + 1 :]))


def _smaller_settings(settings: Settings) -> Iterator[Settings]:
    least = -(-settings.context // settings.block_size)
    if settings.family != "llama":
        yield replace(settings, family="llama")
    for seqs in _less(settings.max_seqs, 1):
        yield replace(settings, max_seqs=seqs)
    for tokens in _less(settings.max_tokens, settings.max_seqs):
        yield replace(settings, max_tokens=tokens)
    for blocks in _less(settings.num_blocks, least):
        yield replace(settings, num_blocks=blocks)


def _less(value: int, least: int) -> Iterator[int]:
    """Smaller values, the smallest first."""
    tried = [each for each in (least, (value + least) // 2, value - 1) if least <= each < value]
    yield from dict.fromkeys(tried)


def script(trace: Trace, target: type[Target], options: Mapping[str, Any], message: str) -> str:
    """Returns a Python script that runs a trace on a target, and exits with status 1 if it fails.

    Args:
        trace: the trace.
        target, options: class of the target, and its arguments besides the settings.
        message: docstring of the script.
    """
    text = message.replace("\\", "/").replace('"', "'")
    made = "".join(f", {name}={value!r}" for name, value in options.items())
    module, name = target.__module__, target.__name__
    return f'''"""{text}"""

from compiled_attn.testing.fuzz import Trace, run
from {module} import {name}

TRACE = Trace.from_json(r"""
{trace.to_json()}""")

if __name__ == "__main__":
    failure = run(TRACE, {name}(TRACE.settings{made}))
    raise SystemExit(f"{{failure}}" if failure else 0)
'''
