"""Reads LoRA adapters as `PeftModel.save_pretrained` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from compiled_attn.errors import AdapterError
from compiled_attn.models.adapters.adapter import Adapter, adapter_of

__all__ = ["read_adapter"]

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def read_adapter(folder: str | Path) -> Adapter:
    """Reads ``adapter_config.json`` and ``adapter_model.safetensors``; nothing is unpickled.

    Raises:
        AdapterError: a file is missing or damaged, or the adapter is of a kind that is not served.
    """
    path = _path_of(folder)
    if path is None:
        raise AdapterError(
            f"adapter {folder}: expected a directory with {_CONFIG}, as save_pretrained of a "
            "PeftModel writes it, got none: check the path"
        )
    return adapter_of(str(folder), _settings(path), _tensors(path))


def _path_of(folder: str | Path) -> Path | None:
    """The folder of an adapter; None: there is none."""
    try:
        path = Path(folder).expanduser()
        return path if (path / _CONFIG).is_file() else None
    except (OSError, RuntimeError, TypeError, ValueError):  # no path, or of an unknown user
        return None


def _settings(path: Path) -> dict[str, Any]:
    try:
        found = json.loads((path / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path / _CONFIG, error) from error
    if not isinstance(found, dict):
        raise _unreadable(path / _CONFIG, TypeError("it holds no object"))
    return found


def _tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = path / _WEIGHTS
    if not file.is_file():
        raise AdapterError(
            f"adapter {path}: expected {_WEIGHTS}, got none: save it with safe_serialization, as "
            "other files can run code"
        )
    try:
        return load_file(file)
    except (OSError, SafetensorError, ValueError) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> AdapterError:
    reason = f"{error}".splitlines()[0] if f"{error}" else type(error).__name__
    return AdapterError(f"adapter file {file}: cannot be read ({reason}): save the adapter again")
