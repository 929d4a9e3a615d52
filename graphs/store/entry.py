"""Entries of a store: the files of an artifact, with a manifest of its factors and digests."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphs.errors import StoreError
from graphs.files import digest_of, files_in, read_json, write_whole
from graphs.store.factors import key_of
from graphs.store.label import Label
from graphs.store.safety import digests_of_own, refuse_others

__all__ = ["Entry", "write_manifest"]

_FORM = "graphs store entry"
_MANIFEST = "manifest.json"
_FILES = "files"


@dataclass(frozen=True)
class Entry:
    """The artifact that a store holds under one key.

    Attributes:
        key: SHA-256 of the factors.
        factors: everything that the artifact depends on.
        bytes: of its files.
        used: when it was last used, in seconds since the epoch.
        digests: SHA-256 of each file.
        folder: where it is.
    """

    key: str
    factors: Mapping[str, Any]
    bytes: int
    used: float
    digests: Mapping[str, str]
    folder: Path

    @classmethod
    def read(cls, folder: Path) -> Entry:
        """Read the manifest of the entry in `folder`, and not its files.

        Raises:
            ValueError: it has none, or one that cannot be its own.
        """
        try:
            path = folder / _MANIFEST
            written = read_json(path)
            used = path.stat().st_mtime
            if written["form"] != _FORM:
                raise ValueError(f"its manifest is a {written['form']!r}")
            factors, digests = dict(written["factors"]), dict(written["digests"])
            size = int(written["bytes"])
            key = key_of(factors)
        except (OSError, LookupError, TypeError, ArithmeticError) as error:
            raise ValueError(f"its manifest is not readable ({error!r})") from error
        except RecursionError:
            raise ValueError("its manifest is nested too deeply") from None
        if key != folder.name:
            raise ValueError("its factors are not those of its key")
        return cls(folder.name, factors, size, used, digests, folder)

    @property
    def files(self) -> Path:
        """The folder of its files."""
        return self.folder / _FILES

    @property
    def label(self) -> Label:
        """Its label, for people."""
        return Label.read(self.folder)

    def problem(self) -> str:
        """What is wrong with its files, or an empty string; reads every byte and every owner."""
        try:
            refuse_others(self.folder)
            refuse_others(self.folder / _MANIFEST)
            found = digests_of_own(self.files)
        except (OSError, StoreError) as error:
            return str(error)
        if found.keys() != self.digests.keys():
            odd = sorted(found.keys() ^ self.digests.keys())
            return f"its files are not those of its manifest: {', '.join(odd[:3])}"
        wrong = sorted(name for name in found if found[name] != self.digests[name])
        return f"{wrong[0]} does not have the SHA-256 of its manifest" if wrong else ""

    def touch(self) -> None:
        """Note that it is used now."""
        os.utime(self.folder / _MANIFEST)


def write_manifest(folder: Path, factors: Mapping[str, Any]) -> int:
    """Write the manifest of the files in `folder`, after all of them; returns their bytes."""
    files = files_in(folder / _FILES)
    size = sum(path.stat().st_size for path in files.values())
    manifest = {
        "form": _FORM,
        "factors": dict(factors),
        "bytes": size,
        "digests": {name: digest_of(path) for name, path in files.items()},
    }
    write_whole(folder / _MANIFEST, json.dumps(manifest, indent=1, sort_keys=True).encode())
    return size
