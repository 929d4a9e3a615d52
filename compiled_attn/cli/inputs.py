"""Inputs of the commands: backend, dtype, model, sampling, and requests that fit the context."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from compiled_attn.cache.quantisation import KV_DTYPES
from compiled_attn.cli.errors import UserError
from compiled_attn.cli.options import ModelOptions, SamplingOptions, ServingOptions
from compiled_attn.engine import Grammar, SamplingParams
from compiled_attn.engine.sampling import check_lengths
from compiled_attn.models import default_model, load_model
from compiled_attn.models.folder import will_convert
from compiled_attn.ops.paged_attention import build_ahead
from compiled_attn.workloads import Arrival, fit_scale, scaled
from graphs import available_backends

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from compiled_attn.engine.sizing import Sizing

__all__ = [
    "dtype_of",
    "fitted_arrivals",
    "known_backend",
    "model_of",
    "refuse_unavailable",
    "sampling_of",
    "tell_conversion",
]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def known_backend(options: ModelOptions) -> str | None:
    """Returns why the backend cannot work here, or None; raises UserError for an unknown name."""
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
    directory: Path | None,
    dtype: str,
    seed: int = 0,
    device: str = "cpu",
    kv_dtype: str = "auto",
) -> PreTrainedModel:
    """Loads the model of a directory, or makes the default model of a seed."""
    kind = _DTYPES[dtype]
    if directory is None:
        return default_model(seed, kind, device)
    if device == "cpu":
        build_ahead(KV_DTYPES.get(kv_dtype, kind))
    tell_conversion(directory)
    return load_model(directory, kind, device)


def tell_conversion(model: Path) -> None:
    """Prints on stderr if the settings of a GGUF file have to be read, which takes long."""
    if will_convert(model):
        print(f"reading the tokenizer of the GGUF file of {model}, once", file=sys.stderr)


def fitted_arrivals(
    options: ServingOptions, arrivals: Sequence[Arrival], sizing: Sizing
) -> tuple[list[Arrival], str]:
    """Scales requests to lengths that the engine can serve; returns them and a summary line.

    Raises ValueError if ``--scale`` makes a request too long.
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


def sampling_of(options: SamplingOptions) -> SamplingParams:
    """Builds the sampling parameters of the options; raises UserError or ValueError."""
    names = {each.name for each in fields(options)} & {each.name for each in fields(SamplingParams)}
    settings = {name: getattr(options, name) for name in names - {"stop", "grammar"}}
    return SamplingParams(**settings, stop=tuple(options.stop or ()), grammar=_grammar_of(options))


def _grammar_of(options: SamplingOptions) -> Grammar | None:
    names = ("json_schema", "regex", "grammar")
    given = [name for name in names if getattr(options, name) is not None]
    if len(given) > 1:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UserError(f"{flags} were given: choose one")
    if options.json_schema is not None:
        return Grammar.json_schema(_read(options.json_schema))
    if options.grammar is not None:
        return Grammar.ebnf(_read(options.grammar))
    return None if options.regex is None else Grammar.regex(options.regex)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start + 1}: save it as UTF-8") from error
