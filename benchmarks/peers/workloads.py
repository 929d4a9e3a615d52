"""The requests that all systems serve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from compiled_attn.workloads import Arrival, fit, prompts, read_trace

CONTEXT = 8192
TRACE = Path(__file__).resolve().parents[3] / "shared/traces/mooncake_conversation_tiny.jsonl"
"""A real trace, whose lengths are divided by 16; prompts share prefixes as there."""

NAMES = ("decode1", "decode4", "decode", "prefill", "trace", "long")


@dataclass(frozen=True)
class Workload:
    """Requests that are all there at the beginning, each generates its own number of tokens."""

    name: str
    arrivals: tuple[Arrival, ...]

    def __str__(self) -> str:
        lengths = {(each.prompt_tokens, each.output_tokens) for each in self.arrivals}
        if len(lengths) == 1:
            prompt, new = lengths.pop()
            return f"{self.name}: {len(self.arrivals)} x ({prompt:,} + {new})"
        prompt = sum(each.prompt_tokens for each in self.arrivals)
        new = sum(self.new)
        return f"{self.name}: {len(self.arrivals)} requests, {prompt:,} + {new} tokens in all"

    @property
    def new(self) -> list[int]:
        """Tokens that each request generates."""
        return [each.output_tokens for each in self.arrivals]

    def prompts(self, vocabulary: int, seed: int) -> list[list[int]]:
        """Token ids: others for each seed, so that no cache of prefixes knows the last round's."""
        return prompts(self.arrivals, vocabulary, seed)


def workloads(names: tuple[str, ...], trace: Path) -> Iterator[Workload]:
    """Those of the names, but the trace's where there is no such file."""
    for name, count in (("decode1", 1), ("decode4", 4), ("decode", 16)):
        if name in names:
            yield Workload(name, (Arrival(0, 128, 64),) * count)
    if "prefill" in names:
        yield Workload("prefill", (Arrival(0, 512, 1),) * 4)
    if "trace" in names and trace.is_file():
        yield Workload("trace", tuple(fit(read_trace(trace, 10), CONTEXT)))
    elif "trace" in names:
        print(f"# trace: skipped, no such file as {trace} (--trace names another)")
    if "long" in names:
        yield Workload("long", (Arrival(0, 6000, 32),))
