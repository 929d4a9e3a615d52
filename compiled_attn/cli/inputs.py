"""The inputs of ``run`` and ``plan``: a model, and requests whose lengths it can hold."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from compiled_attn.cli.errors import UserError
from compiled_attn.cli.options import ServingOptions
from compiled_attn.models import default_model, load_model
from compiled_attn.workloads import Arrival, fit_scale, scaled
from graphs import available_backends

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from compiled_attn.engine.sizing import Sizing

__all__ = ["fitted_arrivals", "known_backend", "model_of"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def known_backend(options: ServingOptions) -> str | None:
    """Why the backend cannot work here, None if it can.

    Raises:
        UserError: there is no such backend, or no such dtype.
    """
    backends = available_backends()
    if options.dtype not in _DTYPES:
        raise UserError(f"unknown --dtype {options.dtype}: choose one of {', '.join(_DTYPES)}")
    if options.backend not in backends:
        names = ", ".join(sorted(backends))
        raise UserError(f"unknown --backend {options.backend}: choose one of {names}")
    return backends[options.backend]


def model_of(directory: Path | None, dtype: str, seed: int = 0) -> PreTrainedModel:
    """The model of the directory, or else the default model of that seed."""
    kind = _DTYPES[dtype]
    return default_model(seed, kind) if directory is None else load_model(directory, kind)


def fitted_arrivals(
    options: ServingOptions, arrivals: Sequence[Arrival], sizing: Sizing
) -> list[Arrival]:
    """The requests in lengths that the engine can serve; says on stderr what they come to.

    Raises:
        ValueError: the scale that was asked for makes one too long.
    """
    scale = fit_scale(arrivals, sizing.context) if options.scale is None else options.scale
    arrivals = scaled(arrivals, scale)
    for arrival in arrivals:
        sizing.check_lengths(arrival.prompt_tokens, arrival.output_tokens)
    prompt_tokens = sum(arrival.prompt_tokens for arrival in arrivals)
    output_tokens = sum(arrival.output_tokens for arrival in arrivals)
    print(
        f"{len(arrivals):,} requests, lengths scaled by {scale:g}: {prompt_tokens:,} prompt "
        f"tokens, {output_tokens:,} to generate",
        file=sys.stderr,
    )
    return arrivals
