"""The command ``tune``: autotunes kernels and linear layers again."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from rich.console import Console
from rich.table import Table

from compiled_attn.cli.errors import UserError, bad_input
from compiled_attn.cli.inputs import model_of
from compiled_attn.cli.options import TuneOptions
from compiled_attn.errors import NativeUnavailable
from compiled_attn.models.packed import packable
from compiled_attn.ops import load
from compiled_attn.ops.cpu.calibration import calibrate
from compiled_attn.ops.cpu.kernel_tuning import TuningResult
from compiled_attn.ops.tuning import FLOAT32, HALVES, ONEDNN, Tuning, onednn_sizes, tuning
from graphs.backends.onednn_linear import for_cpu

__all__ = ["run_tune"]


def run_tune(options: TuneOptions) -> int:
    """Measures kernel tunings and a model's linear layers in both dtypes, and prints both.

    Raises:
        UserError: there is no such model, or no native kernel.
    """
    with bad_input():
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        model = model_of(options.model, "bfloat16")
    try:
        tuned = tuning()
    except NativeUnavailable as error:
        raise UserError(str(error)) from error
    result = _calibrated()
    tuned.forget()
    for typed in (model.bfloat16, model.float):
        for weight in packable(typed()):
            tuned.packing(weight)
    if for_cpu():
        onednn_sizes(model, tuned)
    console = Console()
    if result is not None:
        console.print(_kernel_table(result))
        console.print(f"selected: {result.tuning}", soft_wrap=True, highlight=False)
    console.print(_of_layers(tuned))
    saved = f"saved in {tuned.file}" if tuned.file else "not saved: the folder cannot be written"
    console.print(saved, soft_wrap=True, highlight=False)
    return 0


def _calibrated() -> TuningResult | None:
    ops = load()
    return calibrate(ops.build.library, ops.isa, torch.ops.compiled_attn) if ops.build else None


def _kernel_table(result: TuningResult) -> Table:
    table = Table(title="kernel tuning", title_justify="left")
    table.add_column("setting")
    table.add_column("over the best guess", justify="right")
    for setting, ratio in result.ratios.items():
        table.add_row(setting, f"{ratio:.2f}")
    return table


def _of_layers(tuned: Tuning) -> Table:
    table = Table(title=f"linear layers, {load().isa}", title_justify="left")
    table.add_column("layer")
    table.add_column("packed over plain", justify="right")
    table.add_column("oneDNN over MKL", justify="right")
    table.add_column("taken")
    for layer, ratio in tuned.results.items():
        if layer.endswith(ONEDNN):
            table.add_row(layer, "", f"{ratio:.2f}", "oneDNN" if ratio > 1 else "MKL")
        else:
            table.add_row(layer, f"{ratio:.2f}", "", _taken(layer, tuned.results))
    return table


def _taken(layer: str, results: Mapping[str, float]) -> str:
    whole = results[layer.replace(HALVES, FLOAT32)]
    if results[layer] > max(whole, 1):
        return "in 16 bits"
    return "packed" if whole > 1 else "plain"
