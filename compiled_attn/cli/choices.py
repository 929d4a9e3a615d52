"""What ``--dtype`` and ``--backend`` can be."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from compiled_attn.cli.errors import UserError

__all__ = ["DTYPES", "refuse_unknown"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def refuse_unknown(dtype: str, backend: str, backends: Mapping[str, str | None]) -> None:
    """Raises UserError for a dtype or a backend that there is not."""
    if dtype not in DTYPES:
        raise UserError(f"unknown --dtype {dtype}: choose one of {', '.join(DTYPES)}")
    if backend not in backends:
        raise UserError(f"unknown --backend {backend}: choose one of {', '.join(sorted(backends))}")
