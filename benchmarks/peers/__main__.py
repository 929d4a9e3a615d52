"""The same requests through this engine, vLLM, OpenVINO GenAI, llama.cpp and `generate_batch`.

    PYTHONPATH=benchmarks python -m peers [--model DIR] [--dtypes bfloat16 q4_0] [--threads 1]

Each is a process of its own, in a virtual environment of its own that is made once in the cache,
and stopped (SIGSTOP) while another is measured. The same token ids in, greedy, the same weights:
those of a directory, or random ones of SmolLM2-135M's architecture; q4_0, q4_1 and q8_0 are those
of one GGUF file, for OpenVINO its own rounding to 4 and 8 bits. Workloads: 1, 4 and 16 requests of
128 tokens that generate 64, 4 prompts of 512, the first 10 of a trace, one of 6,000 that generates
32.

Printed: medians over rounds of wall time and CPU seconds (of all processes of a system); the speed
of ours over it, by both, the median of the rounds' ratios; the share of tokens before the first
that differs from ours (float32: 100 %, or the exit code is 1); a first start with empty caches and
the one after it, until a system is ready; resident memory at its highest. A peer that does not
install, start or serve is named with the reason and left out.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence

from peers import table
from peers.contest import Contest
from peers.options import parser_of, tasks
from peers.rounds import measure, warm_up
from peers.systems import OURS, PEERS, System, Task
from peers.workloads import Workload, workloads


def main() -> int:
    """Prints the tables of each dtype; 1 if tokens differ that must not."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # stopped processes would remain
    options = _options()
    chosen = [*workloads(options.workloads, options.trace)]
    systems = [OURS, *(each for each in PEERS if each.name in options.peers)]
    agreed = True
    for task in tasks(options):
        print(table.heading(f"{task.dtype}, {task.model.name}"), flush=True)
        agreed &= compare(task, systems, chosen, options.rounds, options.warm)
    return 0 if agreed else 1


def compare(
    task: Task, systems: Sequence[System], chosen: Sequence[Workload], rounds: int, is_warm: bool
) -> bool:
    """Starts all, measures each workload and prints; whether the tokens agree, where they must."""
    vocabulary = json.loads((task.model / "config.json").read_text())["vocab_size"]
    threads = {system.name: system.threads(task) for system in systems}
    agreed = True
    with Contest(task) as contest:
        for system in systems:
            contest.start(system, is_warm)
        warm_up(contest)
        for workload in chosen:
            if OURS.name not in contest.servers:
                raise SystemExit(f"{OURS.name}: {contest.gone[OURS.name]}")
            cells = measure(contest, workload, vocabulary, rounds)
            print(*table.rows(workload, cells, threads), sep="\n", flush=True)
            agreed &= all(cell.equal(cells[OURS.name]) == 1 for cell in cells.values())
        print(*table.starts(contest), sep="\n", end="\n\n", flush=True)
    return agreed or task.dtype != "float32"


def _options() -> argparse.Namespace:
    names = [each.name for each in PEERS]
    parser = parser_of(__doc__, "peers")
    parser.add_argument("--peers", nargs="*", default=names, choices=names)
    parser.add_argument("--warm", action="store_true", help="no cold starts: use what is cached")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
