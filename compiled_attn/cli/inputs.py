"""The inputs of ``run`` and ``plan``: a model, and requests whose lengths it can hold."""

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
    """Why the backend cannot work here, None if it can.

    Raises:
        UserError: there is no such backend, or no such dtype.
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
    """The dtype of the weights; raises UserError if there is none of that name."""
    if options.dtype not in _DTYPES:
        raise UserError(f"unknown --dtype {options.dtype}: choose one of {', '.join(_DTYPES)}")
    return _DTYPES[options.dtype]


def model_of(
    directory: Path | None, dtype: str, seed: int = 0, device: str = "cpu"
) -> PreTrainedModel:
    """The model of the directory, or else the default model of that seed, on a device.

    Says on stderr if that takes long, because a GGUF file has to be converted first.
    """
    kind = _DTYPES[dtype]
    if directory is None:
        return default_model(seed, kind, device)
    tell_conversion(directory)
    return load_model(directory, kind, device)


def tell_conversion(model: Path) -> None:
    """Says on stderr that a GGUF file will be converted now, if that is so."""
    if will_convert(model):
        print(f"converting the GGUF file of {model}, once: half a minute or more", file=sys.stderr)


def fitted_arrivals(
    options: ServingOptions, arrivals: Sequence[Arrival], sizing: Sizing
) -> tuple[list[Arrival], str]:
    """The requests in lengths that the engine can serve, and a line of what they come to.

    Raises:
        ValueError: the scale that was asked for makes one too long.
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
