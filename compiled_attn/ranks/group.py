"""The ranks of one model: processes that torchrun started, and what they tell each other."""

from __future__ import annotations

import datetime
import os
import pickle
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from compiled_attn.errors import ConfigError, RankLost

__all__ = ["Ranks", "joined_ranks"]


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank among those that compute a model together.

    Args:
        rank: its number, from 0 on; rank 0 leads.
        count: how many there are.
        group: name of their process group.
        peers: host and process id of each.
    """

    rank: int
    count: int
    group: str
    peers: tuple[tuple[str, int], ...]

    @property
    def leads(self) -> bool:
        """Whether it is the one that requests come to."""
        return self.rank == 0

    def same(self, facts: dict[str, str]) -> None:
        """Raises ConfigError, on every rank, unless all have the same facts."""
        with self.calling():
            everybody: list[Any] = [None] * self.count
            dist.all_gather_object(everybody, facts)
        for rank, others in enumerate(everybody):
            for name in sorted({*everybody[0], *others}):
                first, own = everybody[0].get(name), others.get(name)
                if first != own:
                    raise ConfigError(
                        f"expected the same {name} on all ranks, got {own} on rank {rank} and "
                        f"{first} on rank 0: start all ranks with the same model, settings and "
                        "versions"
                    )

    def least(self, number: int) -> int:
        """The smallest of a number on all ranks."""
        with self.calling():
            number_of_all = torch.tensor(number)
            dist.all_reduce(number_of_all, dist.ReduceOp.MIN)
        return int(number_of_all)

    def tell(self, what: Any) -> Any:
        """What rank 0 tells all; the others give None, and get it."""
        with self.calling():
            content = pickle.dumps(what) if self.leads else b""
            size = torch.tensor(len(content))
            dist.broadcast(size, 0)
            told = torch.empty(int(size), dtype=torch.uint8)
            if self.leads:
                told = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            dist.broadcast(told, 0)
        return what if self.leads else pickle.loads(told.numpy().tobytes())

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Raises RankLost where another rank does not answer any more."""
        try:
            yield
        except RuntimeError as error:  # gloo's are no other class
            if lost := self._lost():
                raise RankLost(
                    f"expected {self.count} ranks, got no answer of {lost}, which has ended: look "
                    "at its own output, and start all of them again"
                ) from error
            if "Connection" in str(error) or "imed out" in str(error):
                raise RankLost(
                    f"expected {self.count} ranks, got no answer of one of them: look at their "
                    f"output, and start all of them again ({str(error).splitlines()[0]})"
                ) from error
            raise

    def _lost(self) -> str:
        here = socket.gethostname()
        gone = [
            f"rank {rank} (process {pid})"
            for rank, (host, pid) in enumerate(self.peers)
            if host == here and not _is_alive(pid)
        ]
        return ", ".join(gone)


@contextmanager
def joined_ranks(timeout_s: float = 1800.0) -> Iterator[Ranks | None]:
    """The ranks that torchrun started, this one among them; None without torchrun, or alone.

    Args:
        timeout_s: how long a rank waits for the others; one whose process ends is missed at once.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield None
        return
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s))
    try:
        peers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(peers, (socket.gethostname(), os.getpid()))
        group = dist.group.WORLD
        assert group is not None
        yield Ranks(dist.get_rank(), len(peers), group.group_name, tuple(peers))
    finally:
        dist.destroy_process_group()


def _is_alive(pid: int) -> bool:
    """Whether a process runs; one that waits for its parent to notice its end does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")
