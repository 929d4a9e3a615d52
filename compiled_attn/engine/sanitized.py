"""Checks the steps of an engine with the sanitizer inside a context."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from compiled_attn.engine.config import ConfigError
from compiled_attn.engine.engine import Engine
from compiled_attn.engine.local import LocalExecutor
from compiled_attn.engine.watched import StepWatch

__all__ = ["sanitized"]


@contextlib.contextmanager
def sanitized(engine: Engine) -> Iterator[StepWatch]:
    """Checks each step of an engine inside a context, see `kv_sanitizer`."""
    executor, steps = engine.executor, engine._steps
    if not isinstance(executor, LocalExecutor) or executor.report().ranks > 1:
        raise ConfigError(
            f"expected an engine of one process, got one with a {type(executor).__name__}: use the "
            "sanitizer without ranks"
        )
    if steps.watch is not None:
        raise ValueError(
            "expected an engine without a sanitizer, got one in a sanitizer or with sanitize=True: "
            "leave one of them out"
        )
    if engine.warmup_report is not None:
        raise ValueError(
            "expected an engine before its warmup, got a warm one, whose graphs have no checks: "
            "create a new engine and call warmup() inside, or pass EngineConfig(sanitize=True)"
        )
    executor.sanitize(True)
    _renew(engine)
    try:
        steps.watch = watch = StepWatch(executor.cache)
        yield watch
    finally:
        steps.watch = None
        if engine.warmup_report is None:  # a warm engine's graphs and copies use the tags
            executor.sanitize(False)
            _renew(engine)


def _renew(engine: Engine) -> None:
    """Resets memory and scheduler, which hold the block copies of the executor."""
    engine.memory.reset()
    engine.scheduler.restart(engine.pool, engine._requests.values())
