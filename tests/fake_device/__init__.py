"""A fake accelerator, on which tests run what is meant for a device.

Tensors are on ``fake_device:0`` or ``fake_device:1``, each with a stream of its own. The host
cannot read their storages without a copy. The device refuses tensors of two devices in one call,
counts copies and synchronizations, and delays each copy until something waits for it.
"""

from __future__ import annotations

import functools
import hashlib
import subprocess
import sys
import sysconfig
import types
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.cpp_extension import include_paths

from compiled_attn.ops import load
from compiled_attn.ops.cpu.build import default_folder, find_compiler
from graphs.store.lock import locked

__all__ = ["NAME", "Counts", "allocated", "counts", "open_device"]

NAME = "fake_device"

_SOURCE = Path(__file__).with_name("device.cpp")


class Counts(NamedTuple):
    """Counts of what the host has asked of the device.

    Args:
        copies_in, copies_out: to the device, and from it.
        waits: synchronizations, except those of copies.
        kernels: that ran.
        torn: copies to the device whose source the host changed before it waited for them.
    """

    copies_in: int
    copies_out: int
    waits: int
    kernels: int
    torn: int

    def since(self, before: Counts) -> Counts:
        """The difference to earlier counts."""
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


def counts() -> Counts:
    return Counts(*torch.ops.fake_device.counts())


def allocated() -> int:
    """Bytes of memory in use, on both devices; pools of graphs count what is alive in them."""
    return int(torch.ops.fake_device.allocated())


@functools.cache
def open_device() -> torch.device:
    """Returns the device; builds and registers it on the first call of a process."""
    torch.ops.load_library(str(_library()))
    load()  # which defines the ops
    for op in ("paged_attention", "paged_attention_"):
        torch.ops.fake_device.serve(f"compiled_attn::{op}", "")
    torch.ops.fake_device.open()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend()
    return torch.device(NAME, 0)


def _module() -> types.ModuleType:
    """The Python module that torch expects of a device."""
    module = types.ModuleType(f"torch.{NAME}")
    module.is_available = lambda: True  # type: ignore[attr-defined]
    module.device_count = lambda: 2  # type: ignore[attr-defined]
    module.current_device = torch.accelerator.current_device_index  # type: ignore[attr-defined]
    module._is_in_bad_fork = lambda: False  # type: ignore[attr-defined]
    module.mem_get_info = lambda device: (3 * 2**28, 2**30)  # type: ignore[attr-defined]
    module.memory_allocated = lambda device=None: allocated()  # type: ignore[attr-defined]
    module.get_rng_state = lambda device=0: torch.get_rng_state()  # type: ignore[attr-defined]
    module.set_rng_state = lambda state, device=0: None  # type: ignore[attr-defined]
    module.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    return module


def _library() -> Path:
    headers = [f"-I{path}" for path in (*include_paths(), sysconfig.get_path("include"))]
    libraries = Path(torch.__file__).parent / "lib"
    command = [find_compiler(), "-std=c++20", "-O0", "-fPIC", "-shared", *headers, str(_SOURCE)]
    command += [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu", "-ltorch"]
    text = f"{torch.__version__} {command}".encode() + _SOURCE.read_bytes()
    folder = default_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    library = folder / f"fake-device-{hashlib.sha256(text).hexdigest()[:32]}.so"
    with locked(library.with_suffix(".lock"), shared=False, seconds=600):
        if not library.exists():
            made = library.with_suffix(".part")
            subprocess.run([*command, "-o", str(made)], check=True)
            made.replace(library)
    return library
