"""Inputs of the commands: backend, dtype, model, and requests scaled to its context."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from compiled_attn.cli.errors import UserError
from compiled_attn.cli.options import ModelOptions, ServingOptions
from compiled_attn.engine.sampling import check_lengths
from compiled_attn.models import default_model, load_model
from compiled_attn.models.folder import will_convert
from compiled_attn.workloads import Arrival, fit_scale, scaled
from graphs import available_backends

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from compiled_attn.engine.sizing import Sizing

__all__ = [
    "dtype_of",
    "fitted_arrivals",
    "known_backend",
    "model_of",
    "refuse_unavailable",
    "tell_conversion",
]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def known_backend(options: ModelOptions) -> str | None:
    """Returns why the backend cannot work here; None if it can.

    Raises:
        UserError: the backend or the dtype does not exist.
    """
    backends = available_backends()
    dtype_of(options)
    if options.backend not in backends:
        names = ", ".join(sorted(backends))
        raise UserError(f"unknown --backend {options.backend}: choose one of {names}")
    return backends[options.backend]


def refuse_unavailable(options: ModelOptions) -> None:
    """Raises UserError for a backend or a dtype that cannot work here."""
    if reason := known_backend(options):
        raise UserError(f"--backend {options.backend} cannot work here: {reason}")


def dtype_of(options: ModelOptions) -> torch.dtype:
    """Returns the dtype of the weights; raises UserError for an unknown name."""
    if options.dtype not in _DTYPES:
        raise UserError(f"unknown --dtype {options.dtype}: choose one of {', '.join(_DTYPES)}")
    return _DTYPES[options.dtype]


def model_of(
    directory: Path | None, dtype: str, seed: int = 0, device: str = "cpu"
) -> PreTrainedModel:
    """Loads the model of a directory, or makes the default model of a seed."""
    kind = _DTYPES[dtype]
    if directory is None:
        return default_model(seed, kind, device)
    tell_conversion(directory)
    return load_model(directory, kind, device)


def tell_conversion(model: Path) -> None:
    """Prints on stderr if a GGUF file has to be converted, which takes long."""
    if will_convert(model):
        print(f"converting the GGUF file of {model}, once: half a minute or more", file=sys.stderr)


def fitted_arrivals(
    options: ServingOptions, arrivals: Sequence[Arrival], sizing: Sizing
) -> tuple[list[Arrival], str]:
    """Scales requests to lengths that the engine can serve; returns them and a summary line.

    Raises:
        ValueError: ``--scale`` makes a request too long.
    """
    scale = fit_scale(arrivals, sizing.context) if options.scale is None else options.scale
    arrivals = scaled(arrivals, scale)
    for arrival in arrivals:
        check_lengths(sizing, arrival.prompt_tokens, arrival.output_tokens)
    prompt_tokens = sum(arrival.prompt_tokens for arrival in arrivals)
    output_tokens = sum(arrival.output_tokens for arrival in arrivals)
    return arrivals, (
        f"{len(arrivals):,} requests, lengths scaled by {scale:g}: {prompt_tokens:,} prompt "
        f"tokens, {output_tokens:,} to generate"
    )
