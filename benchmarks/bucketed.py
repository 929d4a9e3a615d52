"""A sentence encoder behind a batcher: `graphs.bucketed` next to what one would use instead.

    python benchmarks/bucketed.py --threads 1

The encoder has the shape of MiniLM (BERT, 6 layers of 384). The batcher passes batches of 1 to 32
texts, padded to their longest one of 16 to 512 tokens. Next to it: `torch.compile(dynamic=True)`,
`mark_dynamic` (both compile at their first batch), and one graph at the largest size, to which
everything is padded. Ratios are real tokens a second of ours over theirs: each batch by every way
in turn, medians, without the compiles. Starts are processes of their own: with an empty store and
compile cache, then from both; the processor time of their whole processes, imports included, does
not depend on what else runs.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import BertConfig, BertModel

import graphs
from graphs.report.surroundings import machine
from graphs.store import ArtifactStore, StoredInductor

Encode = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ("bucketed_whisper.py", "bucketed_diffusion.py")
LEAST_LENGTH = 16


class Sizes(NamedTuple):
    """Largest batch and length, layers and width of the encoder."""

    batch: int = 32
    length: int = 512
    layers: int = 6
    width: int = 384


SMALL = Sizes(batch=4, length=64, layers=1, width=32)


def encoder_of(sizes: Sizes) -> BertModel:
    """A BERT of drawn weights."""
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=sizes.width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=max(1, sizes.width // 32),
        intermediate_size=4 * sizes.width,
        max_position_embeddings=sizes.length,
    )
    return BertModel(config).eval().requires_grad_(False)


def bucketed_of(encoder: BertModel, sizes: Sizes, backend: Any = "inductor") -> graphs.Bucketed:
    """What a user writes."""
    length = LEAST_LENGTH, sizes.length
    wrapped = graphs.bucketed(encoder, batch=(1, sizes.batch), length=length, backend=backend)
    wrapped.warmup()
    return wrapped


def batches_of(count: int, sizes: Sizes) -> list[dict[str, Tensor]]:
    """Batches of texts, first a single one; numbers and lengths are spread evenly over octaves."""
    draw = random.Random(0)
    batches = []
    for _ in range(count):
        texts = round(math.exp(draw.uniform(0, math.log(sizes.batch)))) if batches else 1
        longest = round(math.exp(draw.uniform(math.log(LEAST_LENGTH), math.log(sizes.length))))
        lengths = [longest, *(draw.randint(LEAST_LENGTH, longest) for _ in range(texts - 1))]
        mask = torch.arange(longest) < torch.tensor(lengths).unsqueeze(1)
        ids = torch.randint(1, 30000, (texts, longest)) * mask
        batches.append({"input_ids": ids, "attention_mask": mask.long()})
    return batches


def compiled(encoder: BertModel, **options: Any) -> Encode:
    """One `torch.compile` of a function of its own, so that ways do not share a compile cache."""
    return torch.compile(lambda **inputs: encoder(**inputs), **options)


def marked(encode: Encode, sizes: Sizes) -> Encode:
    """Mark sizes before each call, but those of 1, as `mark_dynamic` refuses them."""

    def call(**inputs: Tensor) -> Any:
        inputs = {name: value.detach() for name, value in inputs.items()}  # marks stay
        for value in inputs.values():
            for dim, most in enumerate((sizes.batch, sizes.length)):
                if value.shape[dim] > 1:
                    torch._dynamo.mark_dynamic(value, dim, min=2, max=most)
        return encode(**inputs)

    return call


def padded(encode: Encode, sizes: Sizes) -> Encode:
    """Pad everything to the largest size."""

    def call(**inputs: Tensor) -> Any:
        full = {name: value.new_zeros(sizes.batch, sizes.length) for name, value in inputs.items()}
        rows, length = inputs["input_ids"].shape
        for name, value in inputs.items():
            full[name][:rows, :length] = value
        return encode(**full).last_hidden_state[:rows, :length]

    return call


def seconds_of(encode: Encode, inputs: dict[str, Tensor], clock: Callable[[], float]) -> float:
    """Time one call."""
    start = clock()
    encode(**inputs)
    return clock() - start


def compare(options: argparse.Namespace, sizes: Sizes) -> None:
    """Print tokens a second of all ways, ratios, and late compiles."""
    # On one thread the time of the processor, which others on a busy machine do not change.
    clock = time.process_time if options.threads == 1 else time.perf_counter
    encoder, batches = encoder_of(sizes), batches_of(options.batches, sizes)
    ways: dict[str, Encode] = {
        "dynamic=True": compiled(encoder, dynamic=True, backend=options.backend),
        "mark_dynamic": marked(compiled(encoder, backend=options.backend), sizes),
    }
    late = {}
    for name, encode in ways.items():
        encode(**max(batches, key=lambda each: each["input_ids"].numel()))
        with graphs.no_compile(strict=False) as watch:
            for inputs in batches:
                encode(**inputs)
        late[name] = watch.compiles
    full = padded(compiled(encoder, dynamic=False, backend=options.backend), sizes)
    full(**batches[0])
    ours = bucketed_of(encoder, sizes, options.backend)
    assert ours.report is not None
    print(f"bucketed: {ours.report}")
    with graphs.no_compile() as watch:
        for inputs in batches:
            torch.testing.assert_close(ours(**inputs), encoder(**inputs), rtol=1e-3, atol=1e-4)
    late["bucketed"] = watch.compiles
    ways = {"bucketed": ours, **ways, "eager": encoder}
    times: dict[str, list[list[float]]] = {name: [] for name in ways}
    whole = []
    for _ in range(options.rounds):
        for each in times.values():
            each.append([])
        for inputs in batches:
            for name, encode in ways.items():
                times[name][-1].append(seconds_of(encode, inputs, clock))
        whole.append(seconds_of(full, batches[0], clock))
    tokens = sum(int(inputs["attention_mask"].sum()) for inputs in batches)
    seconds = {
        name: sum(map(statistics.median, zip(*of, strict=True))) for name, of in times.items()
    }
    seconds["padded to the maximum"] = len(batches) * statistics.median(whole)
    for name, each in seconds.items():
        ratio = f"ratio {each / seconds['bucketed']:5.2f}" if name != "bucketed" else " " * 11
        found = f"{late[name]} late compiles" if name in late else ""
        print(f"{name:22} {tokens / each:8.0f} tokens/s  {ratio}  {found}".rstrip())


def starts(options: argparse.Namespace) -> None:
    """Print the time of starts in new processes: from nothing, then from what the first stored."""
    for what in options.starts:
        found = []
        with tempfile.TemporaryDirectory() as folder:
            own = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
            command = [*sys.argv, "--start", what, folder]
            if what in EXAMPLES:
                command = [str(ROOT / "examples" / what), "--store", f"{folder}/store"]
            for _ in range(2):
                before = processor_seconds()
                done = subprocess.run(
                    [sys.executable, *command],
                    env=os.environ | own,
                    check=True,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                wall = re.search(r"^start: ([\d.]+) s", done.stdout, re.MULTILINE)
                assert wall is not None, done.stdout
                found.append((float(wall[1]), processor_seconds() - before))
        (cold, cold_cpu), (second, second_cpu) = found
        print(
            f"start of {what:21} cold {cold:6.1f} s, second {second:5.1f} s; processor time of the "
            f"whole process {cold_cpu:6.1f} s, {second_cpu:5.1f} s",
            flush=True,
        )


def processor_seconds() -> float:
    """Of all processes that this one has started and that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def start(what: str, folder: str, options: argparse.Namespace, sizes: Sizes) -> float:
    """Seconds until nothing compiles any more; for `dynamic=True` two batches, one of a text."""
    encoder, backend = encoder_of(sizes), options.backend
    begin = time.perf_counter()
    if what == "bucketed":
        stored = StoredInductor(ArtifactStore(Path(folder, "store")))
        bucketed_of(encoder, sizes, stored if backend == "inductor" else backend)
    else:
        encode = compiled(encoder, dynamic=True, backend=backend)
        for texts in (sizes.batch, 1):
            ids = torch.ones(texts, sizes.length, dtype=torch.int64)
            encode(input_ids=ids, attention_mask=ids)
    return time.perf_counter() - begin


def main(arguments: Sequence[str] | None = None) -> None:
    """Print all parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--small", action="store_true", help="a tiny encoder, for a test")
    parser.add_argument("--parts", nargs="+", default=["tokens", "starts"])
    parser.add_argument("--starts", nargs="+", default=["bucketed", "dynamic=True", *EXAMPLES])
    parser.add_argument("--start", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    with torch.no_grad():
        run(options, SMALL if options.small else Sizes())


def run(options: argparse.Namespace, sizes: Sizes) -> None:
    """Print the parts that were asked for, or the seconds of one start."""
    if options.start:
        print(f"start: {start(*options.start, options, sizes):.2f} s")
        return
    print(
        f"# {machine()['cpu']}, {options.threads} threads, float32, torch {torch.__version__}; "
        f"{sizes.layers} layers of {sizes.width}, {options.batches} batches of 1 to {sizes.batch} "
        f"texts of {LEAST_LENGTH} to {sizes.length} tokens"
    )
    if "tokens" in options.parts:
        compare(options, sizes)
    if "starts" in options.parts:
        starts(options)


if __name__ == "__main__":
    main()
