"""An engine in a thread of its own, of which a test lets each step go."""

from __future__ import annotations

import threading

from compiled_attn.engine import Engine, SamplingParams
from tests.compiled_attn.engine.counting import CONFIG, Counting

LONG = SamplingParams(max_new_tokens=30)
SECONDS = 20.0  # that nothing here takes, but a machine under load may


class Paced(Counting):
    """Takes a step when the test lets it; fails in the step that the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = threading.Semaphore(0)
        self.begun = threading.Event()
        self.error: BaseException | None = None

    def launch(self, step):
        self.begun.set()
        assert self.steps.acquire(timeout=SECONDS)
        if self.error is not None:
            raise self.error
        return super().launch(step)


def warm_engine(executor=None) -> Engine:
    engine = Engine(executor or Counting(), CONFIG)
    engine.warmup()
    return engine


def used(engine: Engine) -> int:
    """Blocks that requests hold."""
    return engine.sizing.num_blocks - 1 - engine.pool.available
