"""The process group of one model under torchrun, and the collectives of its host side."""

from __future__ import annotations

import datetime
import os
import pickle
import socket
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from compiled_attn.errors import ConfigError, RankLost, RanksDisagree
from compiled_attn.ranks.peers import Peers
from graphs.torch_internals.dispatch import default_store

__all__ = ["Ranks", "join_ranks"]


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank of a process group.

    Args:
        rank: number of this rank; rank 0 leads.
        count: number of ranks.
        group: name of the process group.
        peers: the processes of all ranks.
    """

    rank: int
    count: int
    group: str
    peers: Peers

    @property
    def leads(self) -> bool:
        """Whether requests come to this rank."""
        return self.rank == 0

    def check_equal(self, facts: dict[str, str]) -> None:
        """Raise ConfigError on every rank unless all pass the same facts."""
        with self.guard():
            gathered: list[Any] = [None] * self.count
            dist.all_gather_object(gathered, facts)
        for rank, others in enumerate(gathered):
            for name in sorted({*gathered[0], *others}):
                first, own = gathered[0].get(name), others.get(name)
                if first != own:
                    raise ConfigError(
                        f"expected the same {name} on all ranks, got {own} on rank {rank} and "
                        f"{first} on rank 0: start all ranks with the same model, settings and "
                        "versions"
                    )

    def minimum(self, number: int) -> int:
        """Return the minimum of a number over all ranks."""
        with self.guard():
            reduced = torch.tensor(number)
            dist.all_reduce(reduced, dist.ReduceOp.MIN)
        return int(reduced)

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0 on every rank; the others pass None."""
        with self.guard():
            content = pickle.dumps(value) if self.leads else b""
            size = torch.tensor(len(content))
            dist.broadcast(size, 0)
            buffer = torch.empty(int(size), dtype=torch.uint8)
            if self.leads:
                buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            dist.broadcast(buffer, 0)
        return value if self.leads else pickle.loads(buffer.numpy().tobytes())

    def compare(self, step: Mapping[str, NDArray[np.int64]]) -> None:
        """Compare the next step of all ranks by a hash.

        Raises:
            RanksDisagree: on every rank, with the first difference.
        """
        with self.guard():
            own = torch.tensor(zlib.crc32(b"".join(each.tobytes() for each in step.values())))
            sums = [torch.empty_like(own) for _ in range(self.count)]
            dist.all_gather(sums, own)
            if len({*map(int, sums)}) == 1:
                return
            steps: list[Any] = [None] * self.count
            dist.all_gather_object(steps, {name: each.tolist() for name, each in step.items()})
        rank = next(rank for rank in range(self.count) if steps[rank] != steps[0])
        raise RanksDisagree(
            f"expected the step of rank 0 on all ranks, got another one on rank {rank}: "
            f"{_difference(steps[0], steps[rank])}; start all ranks again, and report it, as this "
            "is a bug of compiled-attn"
        )

    def mark(self, name: str) -> None:
        """Release `wait` for a name on all ranks."""
        with self.guard():
            default_store().set(name, "done")

    def wait(self, name: str) -> None:
        """Wait until a rank has called `mark` for a name."""
        with self.guard():
            while not default_store().check([name]):  # a wait in C++ would block signals
                time.sleep(0.01)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Raise RankLost if a call fails because another rank exited."""
        try:
            yield
        except RanksDisagree:
            raise
        except RuntimeError as error:  # gloo has no error class of its own
            if line := self.peers.explain(str(error)):
                raise RankLost(line) from error
            raise


def _difference(first: Mapping[str, list[int]], other: Mapping[str, list[int]]) -> str:
    name = next(name for name in first if first[name] != other[name])
    expected, got = first[name], other[name]
    pairs = enumerate(zip(expected, got, strict=False))
    at = next((at for at, pair in pairs if pair[0] != pair[1]), None)
    if at is None:
        return f"{len(got)} {name} instead of {len(expected)}"
    return f"{name} {got[at]} instead of {expected[at]} (number {at} of {len(expected)})"


@contextmanager
def join_ranks(timeout_s: float = 1800.0) -> Iterator[Ranks | None]:
    """Join the process group that torchrun started; yields None without torchrun, or for one rank.

    Ctrl-C and torchrun's SIGTERM, which follows the exit of a rank within a second, raise
    KeyboardInterrupt in the main thread.

    Args:
        timeout_s: timeout of collectives; the exit of a process is detected at once.

    Raises:
        RankLost: a rank exited.
    """
    if not dist.is_torchelastic_launched():
        yield None
        return
    # NCCL reduces CUDA tensors; gloo serves the host side.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))
    try:
        if dist.get_world_size() == 1:
            yield None
            return
        addresses: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(addresses, (socket.gethostname(), os.getpid()))
        group = dist.group.WORLD
        assert group is not None
        with Peers(addresses).handle_signals() as peers:
            yield Ranks(dist.get_rank(), len(addresses), group.group_name, peers)
    finally:
        dist.destroy_process_group()
