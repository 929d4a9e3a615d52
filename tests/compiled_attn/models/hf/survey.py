"""Surveys which families the engine serves with the tokens of `generate`.

``python -m tests.compiled_attn.models.hf.survey`` writes benchmarks/results/model_families.md.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging

from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.models.hf import ModelRefused, cache_for
from tests.compiled_attn.models.hf.families import FAMILIES, small_model
from tests.compiled_attn.tiny import plain_generate

PAGE = Path(__file__).parents[4] / "benchmarks" / "results" / "model_families.md"
KERNELS = ("portable", "native")
_LONG = [(7 * i * i + 3 * i + 5) % 120 + 3 for i in range(23)]
# Longer than the windows, in chunks; short; and one that begins as the first, not by whole blocks.
_PROMPTS = [_LONG, [5, 9, 77], _LONG[::2], [*_LONG[:14], 9, 8, 7]]
_NEW = 8
_HEADINGS = {
    "equal": "Equal to generate",
    "refused": "Refused, and why",
    "not built": "Not built here: too large however set, or refused by transformers",
    "wrong": "Wrong",
}
_RESULTS = {heading: result for result, heading in _HEADINGS.items()}
_MARKER = "<!-- written by python -m tests.compiled_attn.models.hf.survey -->"


class FamilyResult(NamedTuple):
    """The result of a family ("equal", "refused", "not built", "wrong") and a note."""

    family: str
    result: str
    note: str

    def row(self) -> str:
        """A row of the page's tables."""
        return f"| {self.family} | {FAMILIES[self.family]} | {self.note} |"


def serve(model: PreTrainedModel, kernel: str) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of some prompts by `generate`, and by an engine with that kernel."""
    expected = [plain_generate(model, prompt, _NEW) for prompt in _PROMPTS]
    config = EngineConfig(
        backend="eager",
        kernel=kernel,  # type: ignore[arg-type]
        block_size=4,
        num_blocks=40,
        context=64,
        max_seqs=3,
        max_tokens_per_step=16,
    )
    engine = Engine(model, config)
    engine.warmup()
    results = engine.generate(_PROMPTS, SamplingParams(max_new_tokens=_NEW, ignore_eos=True))
    by_index = {result.index: list(result.tokens) for result in results}
    return expected, [by_index[index] for index in range(len(_PROMPTS))]


def survey_family(family: str, kernels: Iterable[str] = KERNELS) -> FamilyResult:
    """Builds a small model of a family, and serves it with each kernel."""
    try:
        model = small_model(family)
    except Exception as error:  # configurations fail in their own ways
        return FamilyResult(family, "not built", _one_line(error))
    try:
        note = _note(model)
        for kernel in kernels:
            expected, tokens = serve(model, kernel)
            model.set_attn_implementation("eager")
            if tokens != expected:
                return FamilyResult(family, "wrong", f"{kernel}: {tokens} for {expected}")
    except ModelRefused as error:
        return FamilyResult(family, "refused", _reason(error))
    return FamilyResult(family, "equal", note)


def tables(results: Sequence[FamilyResult]) -> str:
    """The part of the page after its marker."""
    found = Counter(each.result for each in results)
    counts = ", ".join(f"{found[result]} {result}" for result in _HEADINGS)
    lines = [f"transformers {transformers.__version__}, {len(results)} families: {counts}.", ""]
    for result, heading in _HEADINGS.items():
        rows = [each.row() for each in results if each.result == result]
        if rows:
            lines += [f"### {heading}", "", "| family | model | note |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def write(results: Sequence[FamilyResult]) -> None:
    """Replaces the tables after the page's marker."""
    prose, marker, _ = PAGE.read_text().partition(_MARKER)
    PAGE.write_text(f"{prose}{marker}\n\n{tables(results)}")


def listed(family: str) -> FamilyResult:
    """The result of a family on the page; ValueError unless it is listed exactly once."""
    rows: list[FamilyResult] = []
    result = ""
    for line in PAGE.read_text().partition(_MARKER)[2].splitlines():
        result = _RESULTS.get(line.removeprefix("### "), result)
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == family:
            rows.append(FamilyResult(family, result, cells[2]))
    (row,) = rows
    return row


def quiet() -> None:
    """Silences warnings about tiny configurations."""
    warnings.filterwarnings("ignore")
    hf_logging.set_verbosity_error()
    logging.getLogger("compiled_attn").setLevel(logging.ERROR)


def _note(model: PreTrainedModel) -> str:
    """Properties of the cache of its layers."""
    shapes = cache_for(model, 2, 4).shapes
    shared = sum(shape.same_as is not None for shape in shapes)
    own = {shape[:3] for shape in shapes}
    notes = {
        "latents": any(shape.value_dim is None for shape in shapes),
        "layers of several shapes": len(own) > 1,
        f"{shared} of {len(shapes)} layers share keys": bool(shared),
        "values smaller than keys": any((shape.value_dim or 0) < shape.head_dim for shape in shapes)
        and all(shape.value_dim for shape in shapes),
    }
    return "; ".join(note for note, holds in notes.items() if holds)


def _reason(error: ModelRefused) -> str:
    text = str(error).partition(" got a ")[2].partition(": it cannot run")[0]
    if ": they differ by" in text:
        return "computes other logits through the paged cache than by itself"
    return _one_line(text.partition(" ")[2])


def _one_line(error: object) -> str:
    line = " ".join(str(error).split())
    if isinstance(error, Exception):
        line = f"{type(error).__name__}: {line}"
    return line.replace("|", "/")[:160]


def main() -> int:
    """Writes the tables; 1 if any family is wrong."""
    quiet()
    torch.set_num_threads(1)
    results = []
    for family in FAMILIES:
        results.append(survey_family(family))
        print(*results[-1], sep=": ", file=sys.stderr, flush=True)
    write(results)
    return int(any(each.result == "wrong" for each in results))


if __name__ == "__main__":
    sys.exit(main())
