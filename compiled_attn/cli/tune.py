"""The command ``tune``: what is fastest on this machine, measured again."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

from compiled_attn.cli.errors import UserError
from compiled_attn.cli.options import TuneOptions
from compiled_attn.errors import NativeUnavailable
from compiled_attn.hf.packed import packable
from compiled_attn.models import default_model, load_model
from compiled_attn.ops import load
from compiled_attn.ops.tuning import tuning

__all__ = ["run_tune"]


def run_tune(options: TuneOptions) -> int:
    """Measures the linear layers of a model in bfloat16, and prints what that came to.

    Raises:
        UserError: there is no native kernel here.
    """
    try:
        tuned = tuning()
    except NativeUnavailable as error:
        raise UserError(str(error)) from error
    dtype = torch.bfloat16
    model = default_model(0, dtype) if options.model is None else load_model(options.model, dtype)
    tuned.forget()
    for weight in packable(model):
        tuned.packs(weight)
    title = f"linear layers of bfloat16, {load().isa}"
    table = Table(title=title, title_justify="left")
    table.add_column("layer")
    table.add_column("packed over plain", justify="right")
    table.add_column("taken")
    for layer, ratio in tuned.results.items():
        table.add_row(layer, f"{ratio:.2f}", "packed" if ratio > 1 else "plain")
    console = Console()
    console.print(table)
    console.print(f"kept in {tuned.file}", soft_wrap=True, highlight=False)
    return 0
