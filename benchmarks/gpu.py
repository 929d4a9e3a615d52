"""Attention and serving on a GPU: the op against what a user would take instead.

    python benchmarks/gpu.py [--parts serving attention tiles] [--device cuda] [--dtype bfloat16]
                             [--block-size 16] [--json FILE]

32 query heads on 8 KV heads of 128. Blocks lie anywhere in a pool of twice what a step reads, and
each call reads others: cold, but for what the device's caches hold. One process, interleaved,
medians; several calls between two waits, on CUDA replayed from a graph, as an engine has them.
Ratios are speeds of the op: over `copy`, a copy of the same bytes; over `varlen`
(torch.nn.attention.varlen, torch 2.12), `flex` (FlexAttention, decodes), `sdpa` (keys in a row, no
paging) and `gather` (blocks gathered, then SDPA). A kernel that is not available is named with
the reason. Tokens a second of a Llama of 1.2 billion random weights: eager, CUDA graphs, compiled.
Tiles: the usual ones for sm_90, and the speed of these over the ones for all other devices.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerator import serving, tiles
from accelerator.kernels import MAKERS
from accelerator.scene import Sizes, Step, steps
from accelerator.timing import host_seconds, medians

from compiled_attn.ops import load
from compiled_attn.ops.triton.register import measured_plans

CASES = {  # requests, queries, keys of each
    "decode 1 x 8k": (1, 1, 8192),
    "decode 64 x 1k": (64, 1, 1024),
    "decode 64 x 8k": (64, 1, 8192),
    "decode 256 x 2k": (256, 1, 2048),
    "prefill 1 x 8k": (1, 8192, 8192),
    "prefill 8 x 2k": (8, 2048, 2048),
    "chunk 512 of 8k": (1, 512, 8192),
}
SMALL = {"decode 3 x 32": (3, 1, 32), "prefill 2 x 20": (2, 20, 20), "chunk 5 of 30": (1, 5, 30)}
BACKENDS = ["eager", "cudagraph", "inductor"]
PARTS = ["attention", "serving", "tiles"]


def usable(step: Step, expected: torch.Tensor, skipped: dict[str, str]) -> dict[str, Callable]:
    """Return the kernels that compute this step correctly; adds why others are left out."""
    kernels = {}
    for name, make in MAKERS.items():
        try:
            kernel = make(step)
            got = kernel(step)
            if name not in ("copy", "sdpa"):  # sdpa has keys of its own
                torch.testing.assert_close(got.float(), expected, atol=2e-2, rtol=2e-2)
        except Exception as error:  # any failure is reported
            skipped[name] = f"{type(error).__name__}: {error}".splitlines()[0][:100]
        else:
            kernels[name] = kernel
    return kernels


def row(name: str, step_list: list[Step], options: argparse.Namespace) -> dict[str, object]:
    """Print and return the times of one case."""
    step, skipped = step_list[0], dict[str, str]()
    expected = MAKERS["gather"](step)(step).float()
    kernels = usable(step, expected, skipped)
    torch._dynamo.reset()
    runs = {
        each: lambda n, kernel=kernel: kernel(step_list[n % len(step_list)])
        for each, kernel in kernels.items()
    }
    with torch.no_grad():
        found, by_host = medians(runs, options.rounds, options.calls, step.query.device)
        host = host_seconds(runs["op"], options.calls, step.query.device)
    own = found["op"]
    cells = [f"{1e6 * own:9.1f} us", f"{step.kv_bytes / own / 1e9:7.0f} GB/s"]
    cells += [f"{step.flops / own / 1e12:6.1f} TFLOP/s"]
    cells += [f"{other} {found[other] / own:.2f}x" for other in found if other != "op"]
    cells += [f"(host {1e6 * host:.0f} us a call)"]
    print(f"{name:>16}", *cells, flush=True)
    if by_host:
        print(f"{'':>16} # calls by the host, not replayed: {', '.join(by_host)}", flush=True)
    for other, why in skipped.items():
        print(f"{'':>16} # without {other}: {why}", flush=True)
    return {
        "case": name, "seconds": found, "by_host": by_host, "host_seconds": host,
        "skipped": skipped,
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
    parser.add_argument("--backends", nargs="*", default=BACKENDS, help="of the engine")
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
    results: dict[str, Any] = {
        "device": describe(device),
        "attention": [],
        "tiles": [],
        "serving": [],
        "failed": [],
    }

    def save(kind: str, found: object) -> None:
        """Write at once: a run that exceeds its time limit leaves the rows before."""
        results[kind].append(found)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))

    if "attention" in options.parts:
        attention(device, sizes, options, save)
    if "tiles" in options.parts:
        tiles_of_hopper(device, options, save)
    if "serving" in options.parts:
        tokens_a_second(device, dtype, options, save)
    if results["failed"]:
        raise SystemExit(f"# failed: {', '.join(results['failed'])}")


def attention(
    device: torch.device, sizes: Sizes, options: argparse.Namespace, save: Callable
) -> None:
    """A row for each case."""
    for name, case in (SMALL if options.small else CASES).items():
        try:
            step_list = steps(sizes, *case, device, 3)
            with measured_plans(device):  # as in the warmup of an engine
                MAKERS["op"](step_list[0])(step_list[0])
            found = row(name, step_list, options)
        except Exception as error:  # the other cases are still measured
            print(f"{name:>16} failed: {type(error).__name__}: {error}", flush=True)
            save("failed", name)
        else:
            save("attention", found)


def tiles_of_hopper(device: torch.device, options: argparse.Namespace, save: Callable) -> None:
    """A row for each kind of step."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        print("# no tiles: they are for devices of sm_90")
        return
    for kind in tiles.KINDS:
        try:
            found = tiles.row(kind, device, options.rounds, options.calls)
        except Exception as error:
            print(f"{kind} failed: {type(error).__name__}: {error}", flush=True)
            save("failed", str(kind))
        else:
            print(tiles.format_row(found), flush=True)
            save("tiles", found)


def tokens_a_second(
    device: torch.device, dtype: torch.dtype, options: argparse.Namespace, save: Callable
) -> None:
    """A row for each backend."""
    model, slowest = serving.llama(options.small, dtype, device), None
    for name in options.backends:
        try:
            found = serving.row(model, name, options.small)
        except Exception as error:
            print(f"{name:>16} failed: {type(error).__name__}: {error}", flush=True)
            save("failed", name)
            continue
        slowest = slowest or found.speed
        print(
            f"{name:>16} {found.speed:9.0f} tokens/s  {found.speed / slowest:5.2f}x of the first  "
            f"warmup {found.warmup_seconds:.1f} s  kernel {found.kernel} {found.notes}",
            flush=True,
        )
        save("serving", found._asdict())


def describe(device: torch.device) -> str:
    """The device and versions, for the head of the results."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return f"{name}, torch {torch.__version__}, python {platform.python_version()}"


if __name__ == "__main__":
    main()
