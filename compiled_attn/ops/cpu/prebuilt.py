"""Prebuilt libraries of the wheel: checks them and copies them to the cache."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from compiled_attn.ops.cpu.build import Build, digests_of
from compiled_attn.ops.cpu.libraries import cache_library, own_folder
from compiled_attn.ops.schema import SOURCES
from graphs.errors import StoreError
from graphs.files import digest_of, read_json

__all__ = ["MANIFEST", "PACKED", "Manifest", "prebuilt"]

PACKED = Path(__file__).parent / "prebuilt"
"""The wheel's libraries; absent in a checkout."""
MANIFEST = "manifest.json"
_LOCK_SECONDS = 60.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Manifest:
    """What the libraries of a wheel were built from.

    Attributes:
        torch: oldest torch that can load the libraries, whose headers were used.
        machine: ``platform.machine()``.
        platform: tag of the wheel.
        sources: SHA-256 of each C++ source.
    """

    torch: str
    machine: str
    platform: str
    sources: Mapping[str, str]

    def write(self, folder: Path) -> None:
        """Writes it next to the libraries."""
        (folder / MANIFEST).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads it.

        Raises:
            OSError: it cannot be read.
            ValueError: it is corrupt.
        """
        try:
            return cls(**read_json(folder / MANIFEST))
        except TypeError as error:
            raise ValueError(f"expected a manifest of libraries: {error}") from error

    def misfit(self) -> str | None:
        """Why the libraries cannot be used here, or None."""
        if self.machine != platform.machine():
            return f"it was built for {self.machine}, and this is {platform.machine()}"
        if _numbers(torch.__version__) < _numbers(self.torch):
            return f"it needs torch {self.torch} or newer, and this is {torch.__version__}"
        if self.sources != digests_of(SOURCES):
            return "the C++ sources have changed since"
        return None


def prebuilt(isa: str, folder: Path | None = None, packed: Path | None = None) -> Build | None:
    """Returns the wheel's library for an instruction set; None if none fits, with a logged reason.

    Copies it to the cache, since tuning results are saved next to it; uses the wheel's own file
    where the cache is not writable.

    Args:
        isa: one of `isa.ISAS`.
        folder: cache of libraries; None: `libraries.default_folder`.
        packed: folder of the wheel's libraries; None: `PACKED`.
    """
    packed = packed or PACKED
    library = packed / f"{isa}.so"
    if not library.is_file() or not _fits(packed):
        return None
    try:
        cached = _cached(library, isa, own_folder(folder))
    except (StoreError, OSError) as error:
        _log.info("loading the prebuilt kernel from %s: it cannot be cached: %s", packed, error)
        cached = library
    return Build(cached, isa, 0.0, is_prebuilt=True)


@functools.cache
def _fits(packed: Path) -> bool:
    try:
        why = Manifest.read(packed).misfit()
    except (OSError, ValueError) as error:
        why = str(error)
    if why is not None:
        _log.warning("building the kernel from source instead of using the wheel's: %s", why)
    return why is None


def _cached(library: Path, isa: str, folder: Path) -> Path:
    # The key includes torch: tuning results compare with its own layers.
    factors = [digest_of(library), torch.__version__, platform.machine(), *platform.libc_ver()]
    key = hashlib.sha256(json.dumps(factors).encode()).hexdigest()
    cached = folder / f"{isa}-{key[:32]}.so"
    cache_library(
        cached, lambda work: Path(shutil.copyfile(library, work / "library.so")), _LOCK_SECONDS
    )
    return cached


def _numbers(version: Any) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", str(version).partition("+")[0])[:2])
