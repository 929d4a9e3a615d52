"""Virtual environments of the peers, each made once in the cache."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from peers.servers import PeerGone

TORCH = "torch==2.13.0+cpu"
PROJECT = Path(__file__).resolve().parents[2]
_OPTIONAL = ("torchvision", "torchaudio", "torchcodec")
"""Packages that the peers require, and do without where their wheel is for another torch."""


@dataclass(frozen=True)
class Environment:
    """The packages of a peer, in a folder of this name.

    ``with_ours``: also this project, alone. ``is_built``: without torch, from sources, for the
    processor of this machine.
    """

    name: str
    packages: tuple[str, ...]
    with_ours: bool = False
    is_built: bool = False

    def python(self, cache: Path, torch_index: str | None) -> Path:
        """Its interpreter; raises `PeerGone` with pip's reason where it cannot be installed."""
        folder = cache / self.name
        python, stamp = folder / "bin/python", folder / ".installed"
        needed = self.packages if self.is_built else (TORCH, *self.packages)
        packages = "\n".join(needed)
        if not stamp.is_file() or stamp.read_text() != packages:
            print(f"# installing {' '.join(self.packages)} in {folder}", file=sys.stderr)
            _run("making the environment", sys.executable, "-m", "venv", "--clear", str(folder))
            index = ["--retries", "1", "--extra-index-url", torch_index] if torch_index else []
            if self.is_built:
                pip = (str(python), "-m", "pip", "install", "-q", "--no-binary", "llama-cpp-python")
                _run("pip", *pip, *self.packages)
            else:
                _install(python, *index, TORCH)
                _install(python, TORCH, *self.packages)
                _drop_misfits(python)
            if self.with_ours:  # for its entry points: torch and numpy are the peer's
                _run("pip", str(python), "-m", "pip", "install", "-q", "--no-deps", str(PROJECT))
            stamp.write_text(packages)
        return python


def _install(python: Path, *packages: str) -> None:
    """With wheels alone: nothing is built for minutes."""
    quiet = ("--disable-pip-version-check", "-q", "--only-binary", ":all:")
    _run("pip", str(python), "-m", "pip", "install", *quiet, *packages)


def _drop_misfits(python: Path) -> None:
    for each in _OPTIONAL:
        found = subprocess.run([str(python), "-c", f"import {each}"], capture_output=True)
        if found.returncode:
            _run("pip", str(python), "-m", "pip", "uninstall", "-q", "-y", each)


def _run(what: str, *command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line]
        raise PeerGone(f"{what} failed: {(lines or done.stderr.splitlines() or ['?'])[-1]}")
