"""The ranks of one model: processes that torchrun started, and what they tell each other."""

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
from compiled_attn.ranks.ending import Ending
from graphs.torch_internals.dispatch import default_store

__all__ = ["Ranks", "joined_ranks"]


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank among those that compute a model together.

    Args:
        rank: its number, from 0 on; rank 0 leads.
        count: how many there are.
        group: name of their process group.
        ending: what tells of ranks that have ended.
    """

    rank: int
    count: int
    group: str
    ending: Ending

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

    def agree(self, step: Mapping[str, NDArray[np.int64]]) -> None:
        """Compares what all ranks are about to compute, by a hash; the difference is looked for
        only where there is one.

        Raises:
            RanksDisagree: on every rank, with the first difference.
        """
        with self.calling():
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
        """Ends `wait` for a name on all ranks."""
        with self.calling():
            default_store().set(name, "done")

    def wait(self, name: str) -> None:
        """Waits until a rank has called `mark`."""
        with self.calling():
            while not default_store().check([name]):  # one that waits in C++ would hear no signal
                time.sleep(0.01)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Raises RankLost where another rank does not answer any more."""
        try:
            yield
        except RanksDisagree:
            raise
        except RuntimeError as error:  # gloo's errors have no class of their own
            if line := self.ending.why(str(error)):
                raise RankLost(line) from error
            raise


def _difference(first: Mapping[str, list[int]], other: Mapping[str, list[int]]) -> str:
    name = next(name for name in first if first[name] != other[name])
    wanted, got = first[name], other[name]
    pairs = enumerate(zip(wanted, got, strict=False))
    at = next((at for at, pair in pairs if pair[0] != pair[1]), None)
    if at is None:
        return f"{len(got)} {name} instead of {len(wanted)}"
    return f"{name} {got[at]} instead of {wanted[at]} (number {at} of {len(wanted)})"


@contextmanager
def joined_ranks(timeout_s: float = 1800.0) -> Iterator[Ranks | None]:
    """The ranks that torchrun started, this one among them; None without torchrun, or alone.

    Ctrl-C and the SIGTERM of torchrun, which comes within a second after the end of a rank, raise
    KeyboardInterrupt in the main thread; with a message, if a rank has ended.

    Args:
        timeout_s: how long a rank waits for the others; one whose process ends is missed at once.

    Raises:
        RankLost: a rank has ended.
    """
    if not dist.is_torchelastic_launched():
        yield None
        return
    # Sums of what lies on a CUDA device are NCCL's, and what ranks tell each other is gloo's.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))
    try:
        if dist.get_world_size() == 1:
            yield None
            return
        peers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(peers, (socket.gethostname(), os.getpid()))
        group = dist.group.WORLD
        assert group is not None
        with Ending(peers).heeded() as ending:
            yield Ranks(dist.get_rank(), len(peers), group.group_name, ending)
    finally:
        dist.destroy_process_group()
