"""Runs a trace on a target, and checks every token and every invariant."""

from __future__ import annotations

import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiled_attn.testing.fuzz.target import Reference, Refused, Target
from compiled_attn.testing.fuzz.trace import Operation, Trace

__all__ = ["Failure", "run"]

_SUBMITS = ("submit", "share", "fork")
_ALWAYS = {"submit", "step", "share"}
_PATIENCE = 64  # steps without a token, in addition to one per prompt token


@dataclass(frozen=True)
class Failure:
    """The first failure of a trace.

    Args:
        kind: "tokens" (other tokens than the reference), "surplus" (more tokens than requested,
            after an abort, or for an unknown request), "lost" (a request never finishes),
            "invariant" (`Target.check` found something) or "crash" (the target raised).
        message: expected and actual result.
        operation: index of the operation that failed; the number of operations if a later step
            failed.
        request: id of the request, -1: none.
    """

    kind: str
    message: str
    operation: int
    request: int = -1

    @property
    def cause(self) -> tuple[str, str]:
        """The kind, and of a crash the exception: equal for what has the same cause."""
        return self.kind, self.message.partition(":")[0] if self.kind == "crash" else ""

    def __str__(self) -> str:
        return f"{self.kind} at operation {self.operation}: {self.message}"


class _Violation(Exception):
    def __init__(self, kind: str, message: str, request: int = -1) -> None:
        super().__init__(message)
        self.kind, self.request = kind, request


@dataclass
class _Request:
    operation: Operation
    prompt: list[int]
    seed: int | None
    tokens: list[int] = field(default_factory=list)
    last_operation: int = 0
    is_aborted: bool = False

    @property
    def is_open(self) -> bool:
        return not self.is_aborted and len(self.tokens) < self.operation.new_tokens


def run(trace: Trace, target: Target, counts: Counter[str] | None = None) -> Failure | None:
    """Runs a trace, then steps until every request has finished; returns the first failure or None.

    Skips operations that the target does not support, or whose request does not exist (in a shrunk
    trace). Each token must be the one that `Target.reference` chooses after the same text; another
    token passes if their logits differ by less than twice the rounding error.

    Args:
        trace: the trace.
        target: a new target, or one that was reset.
        counts: incremented: "operations", "skipped", "requests", "refused", "aborted", "steps",
            "tokens", "ties" and the counts of the target.
    """
    running = _Run(trace, target, Counter() if counts is None else counts)
    before = target.counts()
    try:
        running.run()
    except _Violation as found:
        return Failure(found.kind, str(found), running.at, found.request)
    finally:
        running.counts.update({name: n - before[name] for name, n in target.counts().items()})
    return running.wrong_tokens()


class _Run:
    def __init__(self, trace: Trace, target: Target, counts: Counter[str]) -> None:
        self.trace, self.target, self.counts = trace, target, counts
        self.requests: dict[int, _Request] = {}
        self.open: set[int] = set()
        self.at = 0

    def run(self) -> None:
        allowed = _ALWAYS | self.target.supports
        for at, operation in enumerate(self.trace.operations):
            self.at = at
            if operation.kind in allowed and self.apply(operation):
                self.counts["operations"] += 1
            else:
                self.counts["skipped"] += 1
        self.at = len(self.trace.operations)
        self.drain()

    def apply(self, operation: Operation) -> bool:
        """Calls the target; returns False if the operation was not possible."""
        kind = operation.kind
        if kind in _SUBMITS:
            return self.submit(operation)
        if kind == "step":
            for _ in range(operation.count):
                self.step()
        elif kind == "abort":
            return self.abort(operation.request)
        elif kind == "draft":
            self.call(self.target.draft, operation.count)
        else:
            self.call(getattr(self.target, kind))
            self.check()
        return True

    def submit(self, operation: Operation) -> bool:
        prompt, count = [*operation.prompt], max(1, operation.count)
        if operation.kind == "share":
            of = self.requests.get(operation.of)
            if of is None:
                return False
            prompt = [*of.prompt, *of.tokens][: operation.keep] + prompt
        ids = range(operation.request, operation.request + count)
        fits = 0 < len(prompt) <= self.trace.settings.context - operation.new_tokens
        if not fits or operation.new_tokens < 1 or any(each in self.requests for each in ids):
            return False
        supports = self.target.supports
        salt = operation.salt if "salt" in supports else None
        seed = operation.seed if "sample" in supports else None
        call = self.target.submit
        try:
            self.call(
                call, operation.request, prompt, operation.new_tokens, salt=salt, seed=seed,
                count=count,
            )  # fmt: skip
        except Refused:
            self.counts["refused"] += count
            return True
        for choice, each in enumerate(ids):
            own = None if seed is None else seed + choice
            self.requests[each] = _Request(operation, prompt, own)
        self.open.update(ids)
        self.counts["requests"] += count
        return True

    def abort(self, request: int) -> bool:
        found = self.requests.get(request)
        if found is None:
            return False
        first, count = found.operation.request, max(1, found.operation.count)
        ids = [each for each in range(first, first + count) if self.requests[each].is_open]
        if not ids:
            return False
        self.call(self.target.abort, first, count)
        for each in ids:
            self.requests[each].is_aborted = True
            self.counts["aborted"] += 1
        self.open.difference_update(ids)
        self.check()
        return True

    def step(self) -> int:
        """Runs a step; returns the number of new tokens."""
        events = self.call(self.target.step)
        self.counts["steps"] += 1
        tokens = 0
        for name, new in events.items():
            request = self.requests.get(name)
            if request is None or (new and request.is_aborted):
                what = "an unknown" if request is None else "an aborted"
                raise _Violation(
                    "surplus", f"expected no token of {what} request, got {[*new]} of {name}", name
                )
            tokens += len(new)
            if new:
                request.tokens.extend(new)
                request.last_operation = self.at
            if len(request.tokens) > request.operation.new_tokens:
                raise _Violation(
                    "surplus",
                    f"expected {request.operation.new_tokens} tokens of request {name}, got "
                    f"{request.tokens}",
                    name,
                )
            if not request.is_open:
                self.open.discard(name)
        self.counts["tokens"] += tokens
        self.check()
        return tokens

    def drain(self) -> None:
        """Steps until every request has finished."""
        idle = 0
        while self.open:
            idle = 0 if self.step() else idle + 1
            if idle > _PATIENCE + sum(len(self.requests[each].prompt) for each in self.open):
                name = min(self.open)
                request = self.requests[name]
                raise _Violation(
                    "lost",
                    f"request {name} has {len(request.tokens)} of {request.operation.new_tokens} "
                    f"tokens, and no request got one in the last {idle} steps",
                    name,
                )
        self.check(is_idle=True)

    def check(self, is_idle: bool = False) -> None:
        if problem := self.call(self.target.check, is_idle):
            raise _Violation("invariant", problem)

    def call(self, what: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        try:
            return what(*args, **kwargs)
        except Refused:
            raise
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{where.filename.rsplit('/', 1)[-1]}:{where.lineno}"
            text = str(error).strip().split("\n")[0]
            raise _Violation("crash", f"{type(error).__name__}: {text} ({place})") from error

    def wrong_tokens(self) -> Failure | None:
        """Returns the earliest failure of kind "tokens"."""
        found: list[Failure] = []
        answered = {name: each for name, each in self.requests.items() if each.tokens}
        alike = defaultdict[Reference, list[int]](list)
        for name in sorted(answered, key=lambda name: len(answered[name].prompt)):
            alike[self.target.reference_of(name)].append(name)
        for reference, part in ((each, part) for each in alike for part in _parts(alike[each])):
            texts = [[*answered[name].prompt, *answered[name].tokens[:-1]] for name in part]
            for name, text, logits in zip(part, texts, reference.logits(texts), strict=True):
                request = answered[name]
                if message := self.mismatch(reference, request, text, logits):
                    found.append(
                        Failure("tokens", f"request {name} {message}", request.last_operation, name)
                    )
        return min(found, key=lambda each: (each.operation, each.request), default=None)

    def mismatch(
        self, reference: Reference, request: _Request, text: list[int], logits: NDArray[np.float64]
    ) -> str:
        start = len(request.prompt) - 1
        for step, token in enumerate(request.tokens):
            row = logits[start + step]
            expected = reference.choices(row, request.seed, step, 0.0)[0]
            if token == expected:
                continue
            if token in reference.choices(row, request.seed, step, reference.rounding(text)):
                self.counts["ties"] += 1
                continue
            return (
                f"(prompt of {len(request.prompt)}) expected token {expected} after "
                f"{request.tokens[:step]}, got {token}"
            )
        return ""


def _parts(names: list[int], size: int = 64) -> Iterable[list[int]]:
    return (names[start : start + size] for start in range(0, len(names), size))
