"""vLLM on the CPU with its own attention and with ours: the same requests in turns.

    PYTHONPATH=benchmarks python -m peers.vllm_backend [--model DIR] [--dtypes bfloat16 float32]

Two processes of one environment, of which one is stopped (SIGSTOP) while the other is measured:
they differ in ``COMPILED_ATTN_VLLM`` alone. Printed: tokens a second of each (medians), the speed
of ours over theirs by wall time and by CPU seconds (medians of the rounds' ratios), and the share
of tokens before the first that differs (float32: 100 %, or the exit code is 1).
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Mapping

from peers import table
from peers.contest import Contest
from peers.environments import Environment
from peers.options import parser_of, tasks
from peers.rounds import Cell, measure, warm_up
from peers.systems import VLLM, System, Task
from peers.workloads import Workload, workloads

_PACKAGES = VLLM.environment.packages if VLLM.environment else ()
_BOTH = Environment("vllm-backend", _PACKAGES, with_ours=True)
THEIRS = System("vllm", "vllm", _BOTH, variables=(("COMPILED_ATTN_VLLM", "0"),))
OURS = System("vllm-ours", "vllm", _BOTH, variables=(("COMPILED_ATTN_VLLM", "1"),))


def main() -> int:
    """Prints a table of each dtype; 1 if tokens differ that must not, or one does not serve."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # stopped processes would remain
    options = parser_of(__doc__, "peers.vllm_backend").parse_args()
    agreed = True
    for task in tasks(options):
        heading = f"{task.dtype}, {task.model.name}, {task.threads} threads"
        print(table.heading(heading), flush=True)
        agreed &= compare(task, [*workloads(options.workloads, options.trace)], options.rounds)
    return 0 if agreed else 1


def compare(task: Task, served: list[Workload], rounds: int) -> bool:
    """Starts both, measures and prints; whether tokens agree where they must."""
    vocabulary = json.loads((task.model / "config.json").read_text())["vocab_size"]
    agreed = True
    with Contest(task) as contest:
        for system in (THEIRS, OURS):
            contest.start(system, is_warm=True)
        warm_up(contest)
        for workload in served:
            if contest.gone:
                raise SystemExit(f"{contest.gone}")
            cells = measure(contest, workload, vocabulary, rounds)
            print(*rows(workload, cells), sep="\n", flush=True)
            agreed &= cells[THEIRS.name].equal(cells[OURS.name]) == 1
    return agreed or task.dtype != "float32"


def rows(workload: Workload, cells: Mapping[str, Cell]) -> Iterator[str]:
    """Tokens a second of both, and ours over theirs."""
    tokens = sum(workload.new)
    ours, theirs = cells[OURS.name], cells[THEIRS.name]
    yield f"{workload}"
    for name, cell in cells.items():
        yield f"  {name:12}{tokens / cell.seconds:9.1f} tokens/s"
    wall, processor = (theirs.over(ours, unit) for unit in ("seconds", "cpu_seconds"))
    yield f"  ours is {wall:.2f} as fast, {processor:.2f} by CPU time"
    yield f"  equal tokens {theirs.equal(ours):.1%}"


if __name__ == "__main__":
    sys.exit(main())
