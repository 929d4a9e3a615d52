"""Requests to all systems in turns, and what came of them."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from peers.contest import Contest
from peers.servers import Served
from peers.workloads import Workload


@dataclass
class Cell:
    """What one system made of one workload, round by round."""

    rounds: list[Served] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Median over the rounds."""
        return statistics.median(each.seconds for each in self.rounds)

    @property
    def cpu_seconds(self) -> float:
        """Median over the rounds."""
        return statistics.median(each.cpu_seconds for each in self.rounds)

    def over(self, ours: Cell, unit: str) -> float:
        """Its time over ours in the same round, median: of ``seconds`` or ``cpu_seconds``."""
        pairs = zip(self.rounds, ours.rounds, strict=True)
        return statistics.median(getattr(it, unit) / getattr(us, unit) for it, us in pairs)

    def equal(self, ours: Cell) -> float:
        """Share of the tokens that come before the first one of a request that differs."""
        pairs = [
            pair
            for it, us in zip(self.rounds, ours.rounds, strict=True)
            for pair in zip(it.tokens, us.tokens, strict=True)
        ]
        return sum(_agreeing(*pair) for pair in pairs) / sum(len(us) for _, us in pairs)


def warm_up(contest: Contest) -> None:
    """A short request each, so that none meets its first one in a measured round."""
    for name in [*contest.servers]:
        contest.serve(name, [[1] * 16], [4])


def measure(
    contest: Contest, workload: Workload, vocabulary: int, rounds: int
) -> Mapping[str, Cell]:
    """A cell for each system that served all rounds; in each round all get the same requests."""
    cells = {name: Cell() for name in contest.servers}
    for seed in range(rounds):
        prompts = workload.prompts(vocabulary, seed)
        for name, cell in cells.items():
            if (served := contest.serve(name, prompts, workload.new)) is not None:
                cell.rounds.append(served)
                said = f"# {workload.name} {seed}: {name} {served.seconds:.2f} s"
                print(said, file=sys.stderr, flush=True)
    return {name: cell for name, cell in cells.items() if len(cell.rounds) == rounds}


def _agreeing(theirs: Sequence[int], ours: Sequence[int]) -> int:
    different = (i for i, pair in enumerate(zip(theirs, ours, strict=True)) if pair[0] != pair[1])
    return next(different, len(ours))
