"""Host time of a step: all that an engine does around the graph, without a model.

    python benchmarks/host.py [--against DIRECTORY] [--only TEXT]

Scheduler, tables, plan, filled bucket, greedy sampling of a row of 8 logits, tokens and events: the
engine as it is, whose graph is a stub. Decodes of 32 and 256 requests of 1k tokens and 1024 of 32k,
blocks of 32; a step of 31 decodes, and a queue whose head, a prompt of 16k tokens in the
prefix cache, waits for blocks. Milliseconds, medians.

With ``--against`` interleaved with a second process that imports that checkout: the
time there over the time here.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import torch
from native.against import answer, other_process

from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.engine.host_steps import HostSteps
from compiled_attn.engine.kernel import ChosenKernel
from compiled_attn.engine.local import LocalExecutor
from compiled_attn.engine.sizing import Sizing
from compiled_attn.step import BatchBuilder, StepLimits, TableLayout
from graphs import WarmupReport
from graphs.report.surroundings import machine

BLOCK, AHEAD = 32, 1024  # tokens that a request may grow while it is timed


class WithoutModel(LocalExecutor):
    """A local executor whose graph always returns the same logits."""

    def __init__(self, config: EngineConfig) -> None:
        assert config.context is not None and config.num_blocks is not None
        assert config.max_tokens_per_step is not None
        width = -(-config.context // BLOCK)
        layout = TableLayout(config.num_blocks, BLOCK, width)
        limits = StepLimits(
            config.max_tokens_per_step, config.max_seqs, width, config.num_blocks - 1
        )
        buckets = layout.ladder(limits, 24).with_cost(lambda bucket: float(sum(bucket.sizes)))
        self.config, self.eos = config, frozenset()
        self.sizing = Sizing(config.context, 1000, BLOCK, config.num_blocks, layout, buckets)
        self.kernel, self._builder = ChosenKernel("native"), BatchBuilder(config.num_blocks, BLOCK)
        self.copies = SimpleNamespace(num_blocks=config.num_blocks, bytes_per_block=1)  # type: ignore[assignment]
        logits = torch.zeros(config.max_seqs, 8)
        self.graphs = SimpleNamespace(  # type: ignore[assignment]
            bucket=buckets.pick, run=lambda bucket, *inputs: logits
        )
        self._steps = HostSteps.__new__(HostSteps)  # which takes no model
        self._has_logged_cut = self._is_attached = self.schedules_ahead = False

    def warmup(self, progress: object = None) -> WarmupReport:
        """Captures nothing."""
        return WarmupReport((), 0.0)

    def check_unchanged(self) -> None:
        """Does nothing: there is no model."""


def engine_of(requests: int, context: int, spare: int = 0) -> Engine:
    """An engine whose requests of that context all decode."""
    longest = -(-(context + AHEAD) // BLOCK)
    config = EngineConfig(
        max_tokens_per_step=max(2**20, requests),
        max_seqs=requests + 1,
        block_size=BLOCK,
        num_blocks=1 + requests * longest + spare,
        context=context + AHEAD,
    )
    engine = Engine(WithoutModel(config))
    engine.warmup()
    for index in range(requests):  # a salt for each: none shares blocks
        prompt = [(7 * n + index) % 1000 for n in range(context)]
        engine.submit(prompt, SamplingParams(max_new_tokens=AHEAD), salt=str(index))
    return started(engine)


def started(engine: Engine) -> Engine:
    """Steps the engine until all requests decode."""
    while engine.scheduler.waiting or any(each.remaining > 1 for each in engine.scheduler.running):
        engine.step()
    return engine


def with_queue(requests: int, context: int, prompt: int) -> Engine:
    """An engine whose pool is full, and whose queue begins with a fully cached prompt."""
    engine = engine_of(requests, context, spare=prompt // BLOCK + 1)
    text = [n % 1000 for n in range(prompt)]
    engine.scheduler.pool.add("cached", text)
    engine.scheduler.pool.reserve("cached", prompt)
    engine.scheduler.pool.commit("cached", text, prompt)
    text += [0] * (engine.pool.available * BLOCK)  # more than there is room for
    head = engine.scheduler.running[0]
    made = type(head)(10**6, text, len(text), head.sampling, head.arrived_s, events=head.events)
    engine._requests[made.request_id] = made
    engine.scheduler.add(made)
    return engine


def all_cases() -> Iterator[tuple[str, Callable[[], Engine]]]:
    """Yields name and maker of each engine."""
    yield "32 x 1k", partial(engine_of, 32, 1024)
    yield "256 x 1k", partial(engine_of, 256, 1024)
    yield "31 x 1k, 16k waits", partial(with_queue, 31, 1024, 16384)
    yield "1024 x 32k", partial(engine_of, 1024, 32768)


def milliseconds(engine: Engine, steps: int = 10) -> float:
    """Median of a few steps."""
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def main() -> None:
    """Prints a row for each case, or answers a process that does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--against", metavar="DIRECTORY", help="a checkout to compare with")
    parser.add_argument("--only", default="", help="cases with this in their names")
    parser.add_argument("--answers", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases = [case for case in all_cases() if options.only in case[0]]
    if options.answers:
        return answer(cases, milliseconds, options.rounds)
    arguments = f"--rounds={options.rounds}", f"--only={options.only}"
    line = other_process(options.against, *arguments) if options.against else None
    print(f"# {machine()['cpu']}, blocks of {BLOCK}")
    print(f"{'step':20} {'ms here':>8}" + (f"{'there / here':>14}" if line else ""))
    for name, make in cases:
        assert line is None or line() == name, "the other checkout has other cases"
        engine = make()
        pairs = [(milliseconds(engine), float(line()) if line else 1.0)
                 for _ in range(options.rounds)]  # fmt: skip
        here = statistics.median(pair[0] for pair in pairs)
        ratio = statistics.median(there / mine for mine, there in pairs)
        print(f"{name:20} {here:8.3f}" + (f"{ratio:14.2f}" if line else ""), flush=True)


if __name__ == "__main__":
    main()
