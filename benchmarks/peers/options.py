"""The options that the contests share."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from graphs.store.cache_folder import cache_folder
from peers.model import model_directory
from peers.systems import Task
from peers.workloads import NAMES, TRACE


def parser_of(doc: str, module: str) -> argparse.ArgumentParser:
    """What each contest can be asked; a contest may add to it."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=doc.splitlines()[0])
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: random SmolLM2-135M")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--trace", type=Path, default=TRACE, metavar="FILE")
    parser.add_argument("--torch-index", metavar="URL", help="has CPU builds of torch, for pip")
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", default=cache_folder("compiled-attn-peers"),
        help="environments, weights, and caches (default: %(default)s)",
    )  # fmt: skip
    return parser


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    """What all serve, a task for each dtype; cache and model are made where there is none."""
    cache = options.cache.expanduser().resolve()
    cache.mkdir(parents=True, exist_ok=True)
    model = model_directory(options.model, cache).resolve()
    for dtype in options.dtypes:
        yield Task(model, dtype, options.threads, cache, options.torch_index)
