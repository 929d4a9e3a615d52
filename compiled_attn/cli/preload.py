"""Loads torch's library while Python imports the server's packages."""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

__all__ = ["import_server", "preload_torch"]


def import_server() -> None:
    """Imports a part of what the server needs besides torch, if it is installed."""
    with suppress(ImportError):
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401


def preload_torch() -> None:
    """Imports the rest of what the server needs, while torch's library is loaded.

    The dynamic linker needs no GIL, and takes a quarter of a second. What is missing or does not
    load is left to the imports that need it.
    """
    thread = threading.Thread(target=_load_torch, daemon=True)
    thread.start()
    with suppress(ImportError):
        import openai.types.chat  # noqa: F401
    thread.join()


def _load_torch() -> None:
    spec = find_spec("torch")
    if spec is not None and spec.origin is not None:
        with suppress(OSError):
            ctypes.CDLL(str(Path(spec.origin).parent / "lib" / "libtorch_cpu.so"))
