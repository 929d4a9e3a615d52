"""Options that ``run`` and ``plan`` have both: what serves, and within which limits."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

__all__ = [
    "BackendOption",
    "BlockSizeOption",
    "DtypeOption",
    "Kernel",
    "KernelOption",
    "MaxSeqsOption",
    "MaxTokensOption",
    "NumBlocksOption",
    "ScaleOption",
    "TraceOption",
]

_DEMAND, _ENGINE = "What to serve", "How to serve it"


class Kernel(StrEnum):
    """What ``--kernel`` can be."""

    auto = "auto"
    native = "native"
    portable = "portable"


TraceOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        rich_help_panel=_DEMAND,
        help="Requests, Azure CSV or Mooncake JSON lines; without one a demand is drawn.",
    ),
]
ScaleOption: TypeAlias = Annotated[
    float | None,
    typer.Option(
        rich_help_panel=_DEMAND,
        help="Multiplies all lengths; by default what fits the model's context.",
    ),
]
DtypeOption: TypeAlias = Annotated[
    str, typer.Option(rich_help_panel=_ENGINE, help="float32 or bfloat16.")
]
BackendOption: TypeAlias = Annotated[
    str,
    typer.Option(
        rich_help_panel=_ENGINE, help="inductor, aoti or onnxrt (compiled), eager or aot_eager."
    ),
]
KernelOption: TypeAlias = Annotated[
    Kernel,
    typer.Option(
        rich_help_panel=_ENGINE,
        help="native (C++, buckets of tokens and requests), portable (torch alone), or auto: "
        "native where it can.",
    ),
]
MaxTokensOption: TypeAlias = Annotated[
    int, typer.Option(rich_help_panel=_ENGINE, help="Tokens a step computes at most.")
]
MaxSeqsOption: TypeAlias = Annotated[
    int, typer.Option(rich_help_panel=_ENGINE, help="Requests that run at once at most.")
]
BlockSizeOption: TypeAlias = Annotated[
    int, typer.Option(rich_help_panel=_ENGINE, help="Tokens in a block of the KV cache.")
]
NumBlocksOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        rich_help_panel=_ENGINE,
        help="Blocks of the KV cache; by default 256 MiB of them.",
    ),
]
