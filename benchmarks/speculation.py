"""Generated tokens per second with drafts over without, on prompts that repeat themselves.

    python benchmarks/speculation.py [--model smollm2] [--speculate ngram:4] [--dtype bfloat16]
                                     [--prompts 40] [--new 128] [--rounds 3] [--threads N]

40 chats: half ask to edit a function of the standard library, half to copy a passage of a
package's description. One and 8 requests at a time, greedy, inductor backend, prefix cache on. Then
drawn ids, which nothing predicts, 8 at a time. Two engines of one process, by turns, medians of the
processor's time; compile and warmup are excluded. Also compares the tokens.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import inspect
import statistics
import time
from collections.abc import Iterator

import torch

from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.models import load_model
from compiled_attn.text import Tokenizer
from graphs.report.surroundings import machine

MODULES = (
    "textwrap shutil json.decoder json.encoder statistics fractions string calendar configparser"
)
PACKAGES = "numpy torch transformers safetensors jinja2 pytest typer rich"
EDIT = (
    "Add a comment above each line with `return`, and change nothing else. Answer with code only."
)
COPY = "Copy this passage word for word, without any other text."
SHORTEST, LONGEST = 500, 1600  # characters


def functions() -> Iterator[str]:
    """Sources of functions and methods of the standard library."""
    for name in MODULES.split():
        module = importlib.import_module(name)
        classes = [each for _, each in inspect.getmembers(module, inspect.isclass)]
        for owner in (module, *(each for each in classes if each.__module__ == name)):
            for _, function in inspect.getmembers(owner, inspect.isfunction):
                if function.__module__ == name:
                    yield inspect.cleandoc(inspect.getsource(function))


def passages() -> Iterator[str]:
    """Parts of the descriptions of installed packages."""
    for name in PACKAGES.split():
        try:
            text = importlib.metadata.distribution(name).read_text("METADATA") or ""
        except importlib.metadata.PackageNotFoundError:
            continue
        part = ""
        for paragraph in text.partition("\n\n")[2].split("\n\n"):
            part += f"{paragraph}\n\n"
            if len(part) >= SHORTEST:
                yield part.strip()
                part = ""


def chats(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Prompts, half of them edits."""
    found = []
    for task, texts in ((EDIT, functions()), (COPY, passages())):
        sized = dict.fromkeys(each for each in texts if SHORTEST <= len(each) <= LONGEST)
        for text in [*sized][: count // 2]:
            found.append(tokenizer.encode([{"role": "user", "content": f"{task}\n\n{text}"}]))
    return found


def drawn(count: int) -> list[list[int]]:
    """Prompts of drawn ids."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 300, (count,), generator=generator).tolist()
    return [torch.randint(100, 40_000, (n,), generator=generator).tolist() for n in lengths]


class Served:
    """One engine, and what it has served."""

    def __init__(self, options: argparse.Namespace, speculate: str | None) -> None:
        dtype = getattr(torch, options.dtype)
        model = load_model(options.model, dtype=dtype)
        config = EngineConfig(
            speculate=speculate, max_seqs=8, context=options.context, backend=options.backend,
            store=True,
        )  # fmt: skip
        self.engine = Engine(model, config)
        self.engine.warmup()
        self.seconds: list[float] = []
        self.walls: list[float] = []
        self.tokens: list[list[int]] = []

    def serve(self, prompts: list[list[int]], params: SamplingParams, concurrency: int) -> None:
        """Serves all prompts, and remembers the time of each token."""
        wall, begin = time.perf_counter(), time.process_time()
        results = self.engine.generate(prompts, params, concurrency=concurrency, in_order=True)
        self.tokens = [result.tokens for result in results]
        count = sum(map(len, self.tokens))
        self.seconds.append((time.process_time() - begin) / count)
        self.walls.append((time.perf_counter() - wall) / count)


def main() -> None:
    """Prints a row for each workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--speculate", default="ngram:4")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--skip", default="", help="workloads to leave out: one,eight,drawn")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    tokenizer = Tokenizer(options.model)
    both = [Served(options, speculate) for speculate in (None, options.speculate)]
    texts = chats(tokenizer, options.prompts)
    sampling = SamplingParams(max_new_tokens=options.new)
    drawing = SamplingParams(max_new_tokens=options.new, ignore_eos=True, temperature=1.0, seed=0)
    threads = f"{torch.get_num_threads()} threads"
    print(f"# {machine()['cpu']}, {threads}, {options.dtype}, {options.speculate}", flush=True)
    workloads = {
        "one": (texts, sampling, 1),
        "eight": (texts, sampling, 8),
        "drawn": (drawn(options.prompts), drawing, 8),
    }
    for name, workload in workloads.items():
        if name in options.skip.split(","):
            continue
        before = both[1].engine.report().drafts
        for each in both:
            each.serve(*workload)  # the first round fills the prefix cache, and is not counted
            each.seconds, each.walls = [], []
        for _ in range(options.rounds):
            for each in both:
                each.serve(*workload)
        show(name, both, before)


def show(name: str, both: list[Served], before: dict[str, list[int]]) -> None:
    """Prints the row of a workload."""
    without, with_drafts = both
    ratio, wall = (
        statistics.median(getattr(without, kind)) / statistics.median(getattr(with_drafts, kind))
        for kind in ("seconds", "walls")
    )
    drafts = with_drafts.engine.report().drafts
    counts = {
        kind: [now - old for now, old in zip(drafts[kind], before[kind], strict=True)]
        for kind in drafts
    }
    pairs = zip(without.tokens, with_drafts.tokens, strict=True)
    equal = sum(one == other for one, other in pairs)
    print(
        f"{name:6} {1 / statistics.median(without.walls):8.1f} tokens/s without, with drafts "
        f"{ratio:5.2f} times (wall {wall:5.2f}), {equal} of {len(without.tokens)} texts equal, "
        f"drafted {counts['drafted']}, accepted {counts['accepted']}",
        flush=True,
    )


if __name__ == "__main__":
    main()
