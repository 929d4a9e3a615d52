"""Shrinks a failing step as long as the same case fails."""

from __future__ import annotations

import time
from collections.abc import Iterator

from compiled_attn.testing.kit.cases import Case
from compiled_attn.testing.kit.step import JUNK, Step
from compiled_attn.testing.kit.subject import Subject
from compiled_attn.testing.kit.trial import Mismatch

__all__ = ["shrink"]

_SECONDS = 20.0


def shrink(subject: Subject, case: Case, step: Step, message: str) -> tuple[Step, str]:
    """Returns the smallest step found on which the case fails, and its message.

    Uses claimed sizes only.
    """
    until = time.monotonic() + _SECONDS
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(subject, step):
            if time.monotonic() > until:
                return step, message
            if smaller == step or subject.interface.why_not(smaller):
                continue
            try:
                case.check(subject.trial, smaller)
            except Mismatch as error:
                # Another exception of the op may have another cause.
                if _kind(str(error)) == _kind(message):
                    step, message, progress = smaller, str(error), True
                    break
    return step, message


def _kind(message: str) -> str:
    return message.partition(":")[0].partition("[")[0]


def _smaller(subject: Subject, step: Step) -> Iterator[Step]:
    """Yields smaller steps, the largest reductions first."""
    requests = step.requests
    for at in range(len(requests)):
        if len(requests) > 1:
            yield step.replace(requests=requests[:at] + requests[at + 1 :])
    plain = Step(())
    for name in ("alibi", "sinks", "softcap", "window", "strided", "gaps", "cache", "shared",
                 "padding", "padded_requests", "lse", "rotary", "scale", "spread", "latent",
                 "value_dim", "causal", "index", "room", "units", "first_block"):  # fmt: skip
        if getattr(step, name) != getattr(plain, name) and not (
            name == "value_dim" and step.latent
        ):
            yield step.replace(**{name: getattr(plain, name)})
    if step.append and subject.interface.appends == "optional" and not step.rotary:
        yield step.replace(append=False)
    if step.is_poisoned:
        yield step.replace(unowned=JUNK)
    claims, group = subject.claims, step.heads // step.kv_heads
    if step.kv_heads > 1:
        yield step.replace(kv_heads=1, heads=group)
    for fewer in sorted(claims.groups):
        if fewer < group:
            yield step.replace(heads=step.kv_heads * fewer)
    for name, sizes in (("head_dim", claims.head_dims), ("block_size", claims.block_sizes)):
        for size in sorted(sizes):
            if size < getattr(step, name):
                yield step.replace(**{name: size})
    if step.dtype != claims.dtypes[0]:
        yield step.replace(dtype=claims.dtypes[0])
    yield from _shorter(step, subject.interface.rows == "equal")
    if step.window is not None and step.window > 1:
        yield step.replace(window=step.window // 2)
        yield step.replace(window=step.window - 1)
    if step.first_block > 1:
        yield step.replace(first_block=step.first_block // 2)
    if step.seed:
        yield step.replace(seed=0)


def _shorter(step: Step, equal: bool) -> Iterator[Step]:
    """Yields steps with fewer keys or query rows."""
    requests = step.requests
    if equal and requests[0][0] > 1:
        yield step.replace(requests=tuple((rows - 1, max(keys - 1, 0)) for rows, keys in requests))
    for at, (rows, keys) in enumerate(requests):
        smaller = [(rows, keys // 2), (rows, keys - step.block_size), (rows, keys - 1)]
        if not equal:
            smaller = [(1, keys), (rows // 2, keys), (rows - 1, keys - 1), *smaller]
        for few, left in smaller:
            fits = 0 < few <= rows and 0 < left <= keys and few <= left
            if fits and (few, left) != (rows, keys):
                yield step.replace(requests=(*requests[:at], (few, left), *requests[at + 1 :]))
