"""Libraries that came with the wheel: found, checked, and taken to where libraries are kept."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import platform
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from compiled_attn.ops.cpu.build import Build, default_folder, digests_of
from compiled_attn.ops.cpu.libraries import is_whole, put, turn
from compiled_attn.ops.schema import SOURCES
from graphs.errors import StoreError
from graphs.files import digest_of, read_json
from graphs.store.safety import refuse_unsafe

__all__ = ["MANIFEST", "PACKED", "Manifest", "prebuilt"]

PACKED = Path(__file__).parent / "prebuilt"
"""Where a wheel has its libraries; absent in a checkout."""
MANIFEST = "manifest.json"
_PATIENCE_SECONDS = 60.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Manifest:
    """What the libraries of a wheel were built from.

    Attributes:
        torch: version of torch whose headers were used; older ones cannot load the libraries.
        machine: as ``platform.machine()`` says.
        platform: tag of the wheel.
        sources: SHA-256 of each C++ source.
    """

    torch: str
    machine: str
    platform: str
    sources: Mapping[str, str]

    def write(self, folder: Path) -> None:
        """Writes it beside the libraries."""
        (folder / MANIFEST).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads it.

        Raises:
            OSError: it cannot be read.
            ValueError: it is damaged.
        """
        try:
            return cls(**read_json(folder / MANIFEST))
        except TypeError as error:
            raise ValueError(f"expected a manifest of libraries: {error}") from error

    def misfit(self) -> str | None:
        """Why the libraries do not serve here, or None."""
        if self.machine != platform.machine():
            return f"it is for {self.machine}, and this is {platform.machine()}"
        if _numbers(torch.__version__) < _numbers(self.torch):
            return f"it needs torch {self.torch} or newer, and this is {torch.__version__}"
        if self.sources != digests_of(SOURCES):
            return "the C++ sources were changed since"
        return None


def prebuilt(isa: str, folder: Path | None = None, packed: Path | None = None) -> Build | None:
    """The library of the wheel for an instruction set; None: none that fits, with a logged reason.

    It is copied to where built libraries are kept, as what was measured is kept beside it. Where
    nothing can be kept, it is taken from the wheel itself.

    Args:
        isa: one of `isa.ISAS`.
        folder: where libraries are kept; None: `build.default_folder`.
        packed: folder of the wheel's libraries; None: `PACKED`.
    """
    packed = packed or PACKED
    library = packed / f"{isa}.so"
    if not library.is_file() or not _fits(packed):
        return None
    try:
        home = folder or default_folder()
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        refuse_unsafe(home.resolve())
        kept = _kept(library, isa, home.resolve())
    except (StoreError, OSError) as error:
        _log.info("the prebuilt kernel is loaded from %s, as none can be kept: %s", packed, error)
        kept = library
    return Build(kept, isa, 0.0, is_prebuilt=True)


@functools.cache
def _fits(packed: Path) -> bool:
    try:
        why = Manifest.read(packed).misfit()
    except (OSError, ValueError) as error:
        why = str(error)
    if why is not None:
        _log.warning("the wheel's prebuilt kernel is not used, but built from source: %s", why)
    return why is None


def _kept(library: Path, isa: str, folder: Path) -> Path:
    # `tune` keeps beside it which layers are faster than this torch's.
    factors = [digest_of(library), torch.__version__, platform.machine(), *platform.libc_ver()]
    key = hashlib.sha256(json.dumps(factors).encode()).hexdigest()
    kept = folder / f"{isa}-{key[:32]}.so"
    if is_whole(kept):
        return kept
    with turn(kept, _PATIENCE_SECONDS):
        if not is_whole(kept):
            work = Path(tempfile.mkdtemp(prefix=f".{kept.stem}.", dir=folder))
            try:
                put(Path(shutil.copyfile(library, work / "library.so")), kept)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return kept


def _numbers(version: Any) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", str(version).partition("+")[0])[:2])
