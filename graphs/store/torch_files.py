"""The files of torch, of which inductor reads every byte before it loads a graph, and their state.

A graph holds the digest of the files that it was compiled with, inductor's key. To compute it anew
takes a third of a second; where the size and time of change of no file differ it is still that one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

__all__ = ["state_of_torch", "take_key"]


@functools.lru_cache(maxsize=1)
def state_of_torch() -> str:
    """SHA-256 of the path, size and time of change of each of torch's sources."""
    state = hashlib.sha256()
    for each in _sources(str(Path(torch.__file__).parent)):
        found = each.stat()
        state.update(f"{each.path} {found.st_size} {found.st_mtime_ns}\n".encode())
    return state.hexdigest()


def take_key(graph: bytes) -> None:
    """Take inductor's key out of a graph, which was compiled by the torch that is here.

    Args:
        graph: as it was stored.
    """
    from torch._inductor.codecache import torch_key
    from torch.utils._appending_byte_serializer import BytesReader

    key: Any = torch_key
    reader = BytesReader(graph)
    reader.read_bytes()  # its kind
    # Another torch, or it is known already: torch 2.11 asserts that it is not, newer ones raise.
    with contextlib.suppress(AttributeError, AssertionError, RuntimeError):
        key.set(reader.read_bytes())


def _sources(folder: str) -> Iterator[os.DirEntry[str]]:
    for each in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if each.name.endswith((".py", ".so", ".pyd", ".cpp", ".ld")):
            yield each
        elif each.is_dir() and os.path.exists(f"{each.path}/__init__.py"):
            yield from _sources(each.path)
