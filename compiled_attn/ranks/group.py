"""The process group of one model under torchrun, and the collectives of its host side.

A rank that exited is detected by a failed collective, or by torchrun's SIGTERM.
"""

from __future__ import annotations

import datetime
import os
import pickle
import signal
import socket
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from compiled_attn.errors import ConfigError, RankLost, RanksDisagree
from graphs.torch_internals.dispatch import default_store

__all__ = ["Peers", "Ranks", "join_ranks"]

_PATIENCE_S = 2.0  # a connection closes before its process is seen to exit


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank of a process group.

    Args:
        rank: number of this rank; rank 0 leads.
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


class Peers:
    """The processes of all ranks."""

    def __init__(self, addresses: Sequence[tuple[str, int]]) -> None:
        self._addresses = addresses
        self._is_reported = False

    def explain(self, failure: str) -> str:
        """Return a message about exited ranks for a failed call; empty if none has."""
        is_lost = "onnection" in failure or "imed out" in failure or "peer" in failure
        end = time.monotonic() + (_PATIENCE_S if is_lost else 0)
        while not (lost := self._lost()) and time.monotonic() < end:
            time.sleep(0.02)
        if not lost and not is_lost:
            return ""
        self._is_reported = True
        return self._message(lost or f"one of them ({failure.splitlines()[0]})")

    @contextmanager
    def handle_signals(self) -> Iterator[Self]:
        """Turn SIGINT and SIGTERM into one KeyboardInterrupt, see `join_ranks`."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            for each in before:
                signal.signal(each, self._interrupt)
            yield self
        except KeyboardInterrupt as error:
            if str(error):
                raise RankLost(str(error)) from None
            raise
        finally:
            if not self._is_reported:  # otherwise torchrun's own signal may still come
                for each, handler in before.items():
                    signal.signal(each, handler)

    def _interrupt(self, number: int, _: Any) -> None:
        if self._is_reported:  # torchrun repeats SIGINT, and sends SIGTERM after a loss
            return
        self._is_reported = True
        if number == signal.SIGTERM and (lost := self._lost()):
            raise KeyboardInterrupt(self._message(lost))
        raise KeyboardInterrupt

    def _message(self, lost: str) -> str:
        return (
            f"expected {len(self._addresses)} ranks, got no answer of {lost}: see its own output, "
            "and start all ranks again"
        )

    def _lost(self) -> str:
        here = socket.gethostname()
        return ", ".join(
            f"rank {rank} (process {pid}), which exited"
            for rank, (host, pid) in enumerate(self._addresses)
            if host == here and not _is_alive(pid)
        )


def _is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")
