"""Attention and serving on a GPU: the op against what a user would take instead.

    python benchmarks/gpu.py [--parts attention codes weights replays tiles serving engines
                                      providers] [--providers NAME ...]
                             [--device cuda] [--dtype bfloat16] [--block-size 16] [--json FILE]

32 query heads on 8 KV heads of 128. Blocks lie anywhere in a pool of twice what a step reads, and
each call reads others: cold, but for what the device's caches hold. One process, interleaved,
medians; several calls between two waits, on CUDA replayed from a graph, as an engine has them.

attention: speed of the op over ``copy``, a copy of the same bytes; ``flex`` (FlexAttention,
decodes), ``sdpa`` (keys in a row, no paging; torch's choice, cuDNN, flash) and ``gather`` (blocks
gathered, then SDPA). A kernel that is not available is named with the reason. providers: Triton's
kernel and those that may replace it, with default plans; before they are timed, the largest
difference of each from ``gather``. codes: an fp8 cache over one of bfloat16. weights: packed
linear layers over bfloat16. replays: recorded steps with other metadata, bit for bit next to fresh
calls. tiles: the usual ones for sm_90, and their speed over those for all other devices. serving:
tokens a second of a Llama of 1.2 billion random weights: eager, CUDA graphs, compiled. engines:
this engine next to others, and what its steps spend time on.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerator import engines, replays, serving, tiles, weights
from accelerator.kernels import MAKERS
from accelerator.scene import Sizes, Step, steps
from accelerator.timing import host_seconds, medians

from compiled_attn.ops import load
from compiled_attn.ops.providers import PROVIDERS
from compiled_attn.ops.triton.register import measured_plans

CASES = {  # requests, queries, keys of each
    "decode 1 x 8k": (1, 1, 8192),
    "decode 16 x 1k": (16, 1, 1024),
    "decode 64 x 1k": (64, 1, 1024),
    "decode 256 x 1k": (256, 1, 1024),
    "decode 64 x 8k": (64, 1, 8192),
    "prefill 1 x 2k": (1, 2048, 2048),
    "prefill 1 x 8k": (1, 8192, 8192),
    "prefill 1 x 32k": (1, 32768, 32768),
    "prefill 8 x 2k": (8, 2048, 2048),
    "chunk 2k on 30k": (1, 2048, 32768),
}
DECODES = [name for name in CASES if name.startswith("decode")]
SMALL = {"decode 3 x 32": (3, 1, 32), "prefill 2 x 20": (2, 20, 20), "chunk 5 of 30": (1, 5, 30)}
BACKENDS = ["eager", "cudagraph", "inductor"]
PARTS = ["attention", "codes", "weights", "replays", "tiles", "serving", "engines", "providers"]
COPY_AND_SDPA = ("copy", "sdpa", "sdpa cudnn", "sdpa flash")
ATTENTION = ("op", "flex", *COPY_AND_SDPA, "gather")
_TOLERANCE = 2e-2
Save = Callable[[str, object], None]


def usable(
    names: Sequence[str], step: Step, skipped: dict[str, str]
) -> tuple[dict[str, Callable], dict[str, float]]:
    """Return the kernels that compute this step correctly, and each one's largest difference from
    ``gather``; adds why others are left out."""
    expected = MAKERS["gather"](step)(step).float()
    kernels, differences = {}, {}
    for name in names:
        try:
            kernel = MAKERS[name](step)
            got = kernel(step)
            if name not in COPY_AND_SDPA:  # which have keys of their own
                apart = (got.float() - expected).abs()
                differences[name] = float(apart.max())
                if not bool((apart <= _TOLERANCE * (1 + expected.abs())).all()):  # or NaN
                    raise ArithmeticError(f"differs by {differences[name]:.2g} from gather")
        except Exception as error:  # any failure is reported
            skipped[name] = f"{type(error).__name__}: {error}".splitlines()[0][:100]
        else:
            kernels[name] = kernel
    return kernels, differences


def row(
    names: Sequence[str], case: str, step_list: list[Step], options: argparse.Namespace
) -> dict[str, object]:
    """Print and return the times of one case: the first kernel's, and the others next to it."""
    step, skipped = step_list[0], dict[str, str]()
    kernels, differences = usable(names, step, skipped)
    torch._dynamo.reset()
    apart = ", ".join(f"{each} {by:.2g}" for each, by in differences.items())
    print(f"{case:>16} # differences from gather: {apart or 'none'}", flush=True)
    for other, why in skipped.items():
        print(f"{'':>16} # without {other}: {why}", flush=True)
    runs = {
        each: lambda n, kernel=kernel: kernel(step_list[n % len(step_list)])
        for each, kernel in kernels.items()
    }
    first = next(iter(runs))
    with torch.no_grad():
        found, by_host = medians(runs, options.rounds, options.calls, step.query.device)
        host = host_seconds(runs[first], options.calls, step.query.device)
    own = found[first]
    cells = [f"{first} {1e6 * own:9.1f} us", f"{step.kv_bytes / own / 1e9:7.0f} GB/s"]
    cells += [f"{step.flops / own / 1e12:6.1f} TFLOP/s"]
    cells += [f"{other} {found[other] / own:.2f}x" for other in found if other != first]
    cells += [f"(host {1e6 * host:.0f} us a call)"]
    print(f"{case:>16}", *cells, flush=True)
    if by_host:
        print(f"{'':>16} # calls by the host, not replayed: {', '.join(by_host)}", flush=True)
    return {
        "case": case, "seconds": found, "by_host": by_host, "host_seconds": host,
        "skipped": skipped, "differences": differences,
    }  # fmt: skip


def main() -> None:
    """Prints a row for each case, and one for each backend of the engine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=10, help="between two waits")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--providers", nargs="*", default=[*PROVIDERS], choices=[*PROVIDERS])
    parser.add_argument("--backends", nargs="*", default=BACKENDS, help="of the engine")
    parser.add_argument("--models", nargs="*", default=["1b", "8b"], choices=[*engines.MODELS])
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the script")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    try:
        device = torch.zeros(1, device=options.device).device
    except (RuntimeError, AssertionError) as error:
        print(f"# skipped: no device {options.device!r} here ({error})")
        return
    dtype = getattr(torch, options.dtype)
    ops = load()  # which defines the op, for CUDA too
    isa = "Triton" if device.type == "cuda" else ops.isa
    print(f"# {describe(device)}; {dtype}, blocks of {options.block_size}; op: {isa}")
    sizes = Sizes(block_size=options.block_size, dtype=dtype)
    if options.small:
        sizes = Sizes(4, 2, 16, options.block_size, dtype)
    results: dict[str, Any] = {"device": describe(device), **{part: [] for part in PARTS}}
    results["failed"] = []

    def save(kind: str, found: object) -> None:
        """Write at once: a run that exceeds its time limit leaves the rows before."""
        results[kind].append(found)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))

    parts: dict[str, Callable[[], None]] = {
        "attention": partial(attention, device, sizes, options, save),
        "codes": partial(fp8_over_bfloat16, device, sizes, options, save),
        "weights": partial(packed_weights, device, options, save),
        "replays": partial(replays_next_to_fresh_calls, device, dtype, options, save),
        "tiles": partial(tiles_of_hopper, device, options, save),
        "serving": partial(tokens_a_second, device, dtype, options, save),
        "engines": partial(next_to_other_engines, device, dtype, options, save),
        "providers": partial(providers, device, sizes, options, save),
    }
    for name in options.parts:
        parts[name]()
    if results["failed"]:
        raise SystemExit(f"# failed: {', '.join(results['failed'])}")


def each_case(names: Any, run: Callable[[Any], object], kind: str, save: Save) -> None:
    """Save what a part finds for each name; one that fails costs the others nothing."""
    for name in names:
        try:
            found = run(name)
        except Exception as error:
            print(f"{name!s:>16} failed: {type(error).__name__}: {error}", flush=True)
            save("failed", str(name))
        else:
            save(kind, found)


def attention(device: torch.device, sizes: Sizes, options: argparse.Namespace, save: Save) -> None:
    """A row for each case."""
    cases = SMALL if options.small else CASES

    def run(name: str) -> object:
        step_list = steps(sizes, *cases[name], device, 3)
        with measured_plans(device):  # as in the warmup of an engine
            MAKERS["op"](step_list[0])(step_list[0])
        return row(ATTENTION, name, step_list, options)

    each_case(cases, run, "attention", save)


def providers(device: torch.device, sizes: Sizes, options: argparse.Namespace, save: Save) -> None:
    """A row for each case, prompts first: they are what the providers are for."""
    cases = SMALL if options.small else CASES
    names = "triton", *options.providers, *COPY_AND_SDPA
    with suppress(Exception):  # needs FlashAttention 3; varlen says what is missing
        torch.nn.attention.activate_flash_attention_impl("FA3")

    def run(name: str) -> object:
        return row(names, name, steps(sizes, *cases[name], device, 3), options)

    each_case(sorted(cases, key=lambda each: each.startswith("decode")), run, "providers", save)


def fp8_over_bfloat16(
    device: torch.device, sizes: Sizes, options: argparse.Namespace, save: Save
) -> None:
    """A row for each decode: tokens of an fp8 cache over those of a plain one."""
    cases = {"decode 3 x 32": SMALL["decode 3 x 32"]} if options.small else CASES
    op = MAKERS["op"]
    caches = {"plain": sizes, "e4m3": replace(sizes, cache=torch.float8_e4m3fn)}

    def run(name: str) -> object:
        made = {each: steps(of, *cases[name], device, 3) for each, of in caches.items()}
        with measured_plans(device):
            for step, *_ in made.values():
                op(step)(step)
        runs = {
            each: lambda n, found=found: op(found[0])(found[n % len(found)])
            for each, found in made.items()
        }
        seconds, _ = medians(runs, options.rounds, options.calls, device)
        gain = seconds["plain"] / seconds["e4m3"]
        print(f"{name:>16} {1e6 * seconds['e4m3']:9.1f} us  e4m3 {gain:.2f}x of plain", flush=True)
        return {"case": name, "seconds": seconds}

    each_case([*cases] if options.small else DECODES, run, "codes", save)


def packed_weights(device: torch.device, options: argparse.Namespace, save: Save) -> None:
    """Rows for each layer, if the op has a kernel for this device."""
    if reason := weights.why_not(device):
        print(f"# no packed weights: {reason}")
        return
    layers = weights.SMALL_LAYERS if options.small else weights.LAYERS

    def run(name: str) -> object:
        found = [*weights.layer_rows(name, layers[name], device, options.rounds, options.calls)]
        for each in found:
            plain, *ours = each["seconds"].items()
            gains = [f"{bits} {plain[1] / spent:.2f}x" for bits, spent in ours]
            print(f"{name:>16} {each['rows']:4} rows, over bfloat16:", *gains, flush=True)
        return found

    each_case(layers, run, "weights", save)


def replays_next_to_fresh_calls(
    device: torch.device, dtype: torch.dtype, options: argparse.Namespace, save: Save
) -> None:
    """A row for each bucket."""
    buckets = replays.SMALL if options.small else replays.BUCKETS
    count, dim = (20, 16) if options.small else (1000, 128)

    def run(name: str) -> object:
        found = replays.compare(name, buckets[name], count, device, dtype, dim)
        print(f"{name:>16} {found.replays} replays, {found.different} differ", flush=True)
        if found.different:
            raise AssertionError(f"{found.different} of {found.replays} replays differ")
        return found._asdict()

    each_case(buckets, run, "replays", save)


def tiles_of_hopper(device: torch.device, options: argparse.Namespace, save: Save) -> None:
    """A row for each kind of step."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        print("# no tiles: they are for devices of sm_90")
        return

    def run(kind: tiles.Kind) -> object:
        found = tiles.row(kind, device, options.rounds, options.calls)
        print(tiles.format_row(found), flush=True)
        return found

    each_case(tiles.KINDS, run, "tiles", save)


def tokens_a_second(
    device: torch.device, dtype: torch.dtype, options: argparse.Namespace, save: Save
) -> None:
    """A row for each backend."""
    model = serving.llama(options.small, dtype, device)
    speeds: list[float] = []

    def run(name: str) -> object:
        found = serving.row(model, name, options.small)
        speeds.append(found.speed)
        print(
            f"{name:>16} {found.speed:9.0f} tokens/s  {found.speed / speeds[0]:5.2f}x of the first"
            f"  warmup {found.warmup_seconds:.1f} s  kernel {found.kernel} {found.notes}",
            flush=True,
        )
        return found._asdict()

    each_case(options.backends, run, "serving", save)


def next_to_other_engines(
    device: torch.device, dtype: torch.dtype, options: argparse.Namespace, save: Save
) -> None:
    """A row for each model."""
    load_of = engines.Load(3, 9, 4) if options.small else engines.Load(64, 512, 128)
    backend = "cudagraph" if device.type == "cuda" else "eager"

    def run(name: str) -> object:
        setup = engines.Setup(engines.MODELS[name], load_of, backend, dtype, device)
        found = engines.compare(name, setup)
        for system, speed in found["speeds"].items():
            print(f"{name:>16} {system:15}{speed:9.0f} tokens/s", flush=True)
        for system, why in found["skipped"].items():
            print(f"{'':>16} # without {system}: {why}", flush=True)
        parts = [f"{kind} {share:.2f}" for kind, share in found.get("shares", {}).items()]
        print(f"{'':>16} shares of a step:", *parts, flush=True)
        if "ours" not in found["speeds"]:
            raise RuntimeError(found["skipped"]["ours"])
        return found

    each_case(["tiny"] if options.small else options.models, run, "engines", save)


def describe(device: torch.device) -> str:
    """The device and versions, for the head of the results."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return f"{name}, torch {torch.__version__}, python {platform.python_version()}"


if __name__ == "__main__":
    main()
