"""The folder of a bundle: its manifest, and the checks before anything in it is used.

Imports no torch, so that files are read while torch is loaded.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from compiled_attn.errors import ModelError
from graphs.errors import UnsafeStore, quoted
from graphs.files import digest_of, digest_of_open, files_in, read_json
from graphs.store.safety import open_own, refuse_unsafe

__all__ = ["WEIGHTS", "Bundle", "BundleError", "BundleMisfit", "Manifest"]

MANIFEST, DIGEST, WEIGHTS = "manifest.json", "manifest.sha256", "weights.bin"
_FORMAT, _MOST_THREADS, _MOST_DIGEST = 2, 4096, 1024
# Flags of /proc/cpuinfo of instructions that a compiler emits with -march=native; others describe
# the system or the hypervisor.
_COMPILED = re.compile(
    r"s?sse|avx|amx|fma|f16c|bmi|popcnt|movbe|abm|aes|vaes|v?pclmul|gfni|sha_|adx|asimd|sve"
)


class BundleError(ModelError):
    """A bundle cannot be used: it is damaged, incomplete, or not a bundle."""


class BundleMisfit(BundleError):
    """A bundle was made for another processor, torch or version."""


@dataclass(frozen=True)
class Manifest:
    """What a bundle was made from, and what it needs.

    Attributes:
        format: version of the layout of the folder.
        version: of compiled_attn.
        torch: version of torch.
        machine: ``platform.machine()``.
        features: instruction sets of the processor, which compiled code may use.
        isa: instruction set of the kernels.
        threads: that compiled code computes with.
        model: name or path that the model was loaded from.
        libraries: compiled code by file name; the first has the ops.
        files: SHA-256 of each file by name.
        engine: sizes of the engine, see `compiled_attn.bundle.write`.
    """

    format: int
    version: str
    torch: str
    machine: str
    features: Sequence[str]
    isa: str
    threads: int
    model: str
    libraries: Sequence[str]
    files: Mapping[str, str]
    engine: Mapping[str, Any]

    @classmethod
    def of_here(cls, folder: Path, **fields: Any) -> Manifest:
        """Describes the files of a folder that this process wrote."""
        digests = {name: digest_of(path) for name, path in files_in(folder).items()}
        features = sorted(instruction_features())
        here = _FORMAT, _version(), _torch_version(), platform.machine(), features
        return cls(*here, files=digests, **fields)

    @classmethod
    def parse(cls, found: Any) -> Manifest:
        """Makes one of the contents of a file.

        Raises:
            ValueError: something is missing, or of another kind.
        """
        if not isinstance(found, dict) or {*found} != {each.name for each in fields(cls)}:
            raise ValueError("expected an object of its fields")
        made = cls(**found)
        lists, objects = (made.features, made.libraries), (made.files, made.engine)
        if not all(isinstance(each, list) for each in lists) or not made.libraries:
            raise ValueError("expected lists of features and libraries")
        if not all(isinstance(each, dict) for each in objects):
            raise ValueError("expected objects of files and of sizes")
        own = made.version, made.torch, made.machine, made.isa, made.model
        texts = *own, *made.features, *made.libraries, *made.files.values()
        if not all(isinstance(each, str) for each in texts):
            raise ValueError("expected texts")
        for name in (*made.files, *made.libraries):
            if name not in made.files or name in ("", ".", "..") or "/" in name:
                raise ValueError(f"expected names of files in the folder, got {quoted(name)}")
        if not isinstance(made.threads, int) or not 1 <= made.threads <= _MOST_THREADS:
            raise ValueError(f"expected 1 to {_MOST_THREADS} threads, got {quoted(made.threads)}")
        return made

    def write(self, folder: Path) -> None:
        """Writes it, with its own digest."""
        text = json.dumps(dataclasses.asdict(self), indent=1) + "\n"
        (folder / MANIFEST).write_text(text, "utf-8")
        (folder / DIGEST).write_text(digest_of(folder / MANIFEST), "ascii")

    def misfit(self) -> str:
        """Returns what differs between here and what it needs, or an empty string."""
        if self.machine != platform.machine():
            return f"a processor of kind {self.machine}, got {platform.machine()}"
        if missing := sorted({*self.features} - instruction_features()):
            return f"a processor with {', '.join(missing)}, got one without"
        if self.torch != (here := _torch_version()):
            return f"torch {self.torch}, got {here}"
        if self.version != (here := _version()):
            return f"compiled_attn {self.version}, got {here}"
        return ""


def instruction_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Returns the features of this processor that code compiled for it may use."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(name for name in flags.split() if _COMPILED.match(name))


def _version() -> str:
    return str(sys.modules["compiled_attn"].__version__)  # an import would be a cycle


def _torch_version() -> str:
    return importlib.metadata.version("torch")


class Bundle:
    """A folder of `write_bundle`, checked.

    All files but the weights are compared with their digests at once; those of the weights in a
    thread, see `check`.

    Args:
        folder: compiled code is run from it: take only one that you trust. Only this user and root
            may be able to change it.

    Attributes:
        folder: as given.
        manifest: of the folder.

    Raises:
        BundleMisfit: it is for another processor, torch or version; the message says what differs.
        BundleError: it is damaged, or not a bundle.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest = self._read_manifest()
        if differs := self.manifest.misfit():
            raise BundleMisfit(
                f"bundle {folder}: expected {differs}: make a bundle here, or serve the model "
                "without it"
            )
        self._failure: BaseException | None = None
        for name in self.manifest.files:
            if name != WEIGHTS:
                self._check_file(name)
        self._thread = threading.Thread(target=self._check_weights, daemon=True)
        self._thread.start()

    def path(self, name: str) -> Path:
        """Returns the path of a file."""
        return self.folder / name

    def check(self) -> None:
        """Waits until the weights are compared with their digest.

        Raises:
            BundleError: they differ.
        """
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _read_manifest(self) -> Manifest:
        try:
            if not self.folder.is_dir():
                there = "a file" if self.folder.exists() else "nothing of this name"
                raise BundleError(
                    f"bundle {self.folder}: expected a folder of `compiled-attn bundle`, got "
                    f"{there}: name one"
                )
            refuse_unsafe(self.folder.resolve())
            present = files_in(self.folder)
            with open_own(self.folder / DIGEST, in_reach=True) as file:
                expected = file.read(_MOST_DIGEST).decode("ascii", "replace")
            if self._digest_of(MANIFEST) != expected:
                raise self._damaged(MANIFEST)
            found = read_json(self.folder / MANIFEST)
            if isinstance(found, dict) and (got := found.get("format")) != _FORMAT:
                raise BundleMisfit(
                    f"bundle {self.folder}: expected format {_FORMAT}, got {quoted(got)}: make the "
                    "bundle again"
                )
            made = Manifest.parse(found)
        except FileNotFoundError as error:
            raise BundleError(
                f"bundle {self.folder}: expected a folder of `compiled-attn bundle`, got none with "
                f"{Path(str(error.filename)).name}: make it again"
            ) from error
        except BundleError:
            raise
        except UnsafeStore as error:
            raise BundleError(f"bundle {self.folder}: {error}") from error
        except (OSError, ValueError) as error:
            raise BundleError(
                f"bundle {self.folder}: cannot be read ({error}): copy the bundle again"
            ) from error
        if others := present.keys() - {*made.files, MANIFEST, DIGEST}:
            raise BundleError(
                f"bundle {self.folder}: expected the files of its manifest, got {min(others)} too: "
                "remove it"
            )
        return made

    def _digest_of(self, name: str) -> str:
        with open_own(self.folder / name, in_reach=True) as file:
            return digest_of_open(file)

    def _check_file(self, name: str) -> None:
        try:
            digest = self._digest_of(name)
        except UnsafeStore as error:
            raise BundleError(f"bundle {self.folder}: {error}") from error
        except OSError as error:
            raise BundleError(
                f"bundle {self.folder}: {name} cannot be read: {error.strerror or error}: copy the "
                "bundle again"
            ) from error
        if digest != self.manifest.files[name]:
            raise self._damaged(name)

    def _check_weights(self) -> None:
        try:
            self._check_file(WEIGHTS)
        except BaseException as error:
            self._failure = error

    def _damaged(self, name: str) -> BundleError:
        return BundleError(
            f"bundle {self.folder}: expected {name} as it was written, got other bytes: copy the "
            "bundle again"
        )
