"""Models of transformers: loading, adapters, packed weights, and steps on the paged cache (`hf`).

Nothing here opens a network connection. Needs the extra ``hf``, and ``gguf`` for a GGUF file.
"""

from __future__ import annotations

from compiled_attn.models.load import (
    ModelError,
    default_model,
    load_model,
    plain_folder,
    quiet_transformers,
    served_model,
    usable_device,
)

__all__ = [
    "ModelError",
    "default_model",
    "load_model",
    "plain_folder",
    "quiet_transformers",
    "served_model",
    "usable_device",
]
