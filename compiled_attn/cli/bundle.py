"""The command ``bundle``: writes a model with its compiled graphs to a folder."""

from __future__ import annotations

import sys

import torch

from compiled_attn.bundle import write_bundle
from compiled_attn.cli.errors import UserError, bad_input
from compiled_attn.cli.inputs import dtype_of, refuse_unavailable, tell_conversion
from compiled_attn.cli.options import BundleOptions
from compiled_attn.cli.replicas import serving_backend, serving_config
from compiled_attn.engine.local import LocalExecutor
from compiled_attn.text.llm import LLM
from graphs import progress_for
from graphs.cli.errors import refuse_unwritable

__all__ = ["run_bundle"]

_SERVED = {"backend": ("inductor",), "kernel": ("auto", "native"), "device": ("cpu",)}


def run_bundle(options: BundleOptions) -> int:
    """Writes a bundle; returns the exit code. Raises UserError for bad input."""
    with bad_input(), serving_backend(options) as backend:
        refuse_unavailable(options)
        tell_conversion(options.model)
        _refuse(options)
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        config = serving_config(options, backend)
        shown, dtype = progress_for(sys.stderr), dtype_of(options)
        with LLM(options.model, config, dtype=dtype, device=options.device, progress=shown) as llm:
            executor = llm.engine.executor
            assert isinstance(executor, LocalExecutor)
            tokenizer = llm.tokenizer.of_transformers
            made = write_bundle(executor, tokenizer, options.out, str(options.model))
    size = sum(path.stat().st_size for path in options.out.iterdir()) / 2**20
    print(
        f"{options.out}: {size:,.0f} MiB, for {made.isa} with {made.threads} threads and torch "
        f"{made.torch}; serve it with: compiled-attn serve --bundle {options.out}"
    )
    return 0


def _refuse(options: BundleOptions) -> None:
    """Raises UserError or OSError, before the warmup, for what `write_bundle` would refuse."""
    for name, served in _SERVED.items():
        if (got := getattr(options, name)) not in served:
            raise UserError(
                f"expected --{name} {' or '.join(served)} for a bundle, got {got}: leave it out"
            )
    if options.out.exists():
        raise UserError(f"expected a new folder for --out, got {options.out}: name another one")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    refuse_unwritable([options.out], None)
