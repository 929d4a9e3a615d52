"""Surveys which families the engine serves with the tokens of `generate`.

``make families`` stores the results of a version in benchmarks/results/families and writes
benchmarks/results/model_families.md of all versions there.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging

from compiled_attn.cache.kv_cache import PagedKVCache
from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.models.hf import ModelRefused, cache_for
from tests.compiled_attn.models.hf.families import (
    FAMILIES,
    TooLargeError,
    small_model,
    text_parts,
)
from tests.compiled_attn.tiny import plain_generate

_RESULTS = Path(__file__).parents[4] / "benchmarks" / "results"
PAGE = _RESULTS / "model_families.md"
_KERNELS = ("portable", "native")
# The portable kernel has no states; a snapshot of these for every block.
_WITH_STATES: dict[str, Any] = {"state_memory": "1MiB", "snapshot_every": 1}
_LONG = [(7 * i * i + 3 * i + 5) % 120 + 3 for i in range(23)]
# Longer than the windows, in chunks; short; and one that begins as the first, not by whole blocks.
_PROMPTS = [_LONG, [5, 9, 77], _LONG[::2], [*_LONG[:14], 9, 8, 7]]
_NEW = 8
_HEADINGS = {"equal": "Equal to generate", "refused": "Refused, and why", "wrong": "Wrong"}
_INTRODUCTION = """\
# Every family of causal language models

Written by `make families`, or `make families TRANSFORMERS=5.23.0` for another version. A small
model of random weights of each family is served with both kernels (states: with the native one),
in chunks, with preemption and a cached prefix, and compared with `generate` token by token.
"""


class FamilyResult(NamedTuple):
    """The result of a family ("equal", "refused", "wrong") and a note."""

    family: str
    result: str
    note: str


class Survey(NamedTuple):
    """The results of a version of transformers.

    Args:
        families: result and note of each family.
        parts: families that are the text part of other models, with the names of these.
    """

    families: dict[str, list[str]]
    parts: dict[str, list[str]]

    def counts(self) -> dict[str, int]:
        """Families of each result."""
        found = Counter(result for result, _ in self.families.values())
        return {result: found[result] for result in _HEADINGS}

    def to_json(self) -> str:
        """JSON with one line for each family."""
        tables = []
        for name, table in self._asdict().items():
            rows = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in table.items()]
            tables.append(f' "{name}": {{\n' + ",\n".join(rows) + "\n }")
        return "{\n" + ",\n".join(tables) + "\n}\n"


def serve(
    model: PreTrainedModel, kernel: str, settings: Mapping[str, Any]
) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of some prompts by `generate`, and by an engine with that kernel and settings."""
    expected = [plain_generate(model, prompt, _NEW) for prompt in _PROMPTS]
    config = EngineConfig(
        backend="eager",
        kernel=kernel,  # type: ignore[arg-type]
        block_size=4,
        num_blocks=14,  # too few for three requests: some are preempted
        context=40,
        max_seqs=3,
        max_tokens_per_step=16,
        **settings,
    )
    engine = Engine(model, config)
    engine.warmup()
    params = SamplingParams(max_new_tokens=_NEW, ignore_eos=True)
    results = sorted(engine.generate(_PROMPTS, params), key=lambda result: result.index)
    again = engine.generate(_PROMPTS[:1], params)  # its prefix is cached
    tokens = [list(result.tokens) for result in (*results, *again)]
    return [*expected, expected[0]], tokens


def survey_family(family: str) -> FamilyResult:
    """Builds a small model of a family, and serves it with each kernel."""
    try:
        model = small_model(family)
    except TooLargeError as error:
        return FamilyResult(family, "wrong", str(error))
    except Exception as error:  # configurations fail in their own ways
        return FamilyResult(family, "refused", f"transformers cannot build it: {_one_line(error)}")
    try:
        cache = cache_for(model, 2, 4)
        note = _note(cache)
        for kernel in _KERNELS if cache.states is None else _KERNELS[1:]:
            expected, tokens = serve(model, kernel, {} if cache.states is None else _WITH_STATES)
            model.set_attn_implementation("eager")
            if tokens != expected:
                return FamilyResult(family, "wrong", f"{kernel}: {tokens} for {expected}")
    except ModelRefused as error:
        return FamilyResult(family, "refused", _reason(error))
    except Exception as error:
        return FamilyResult(family, "wrong", _one_line(error))
    return FamilyResult(family, "equal", note)


def surveys() -> dict[str, Survey]:
    """All stored surveys by version of transformers, the newest first."""
    files = (_RESULTS / "families").glob("*.json")
    by_version = {path.stem: Survey(**json.loads(path.read_text())) for path in files}
    order = sorted(by_version, key=lambda version: [*map(int, version.split("."))], reverse=True)
    return {version: by_version[version] for version in order}


def page(found: Mapping[str, Survey]) -> str:
    """The page of some surveys, in the order of its columns."""
    heads = ["transformers", "families", *_HEADINGS]
    lines = [_INTRODUCTION, f"| {_joined(heads)} |", "|---" * len(heads) + "|"]
    for version, survey in found.items():
        counts = survey.counts()
        lines.append(f"| {version} | {sum(counts.values())} | {_joined(counts.values())} |")
    newest, *older = found
    now = found[newest].families
    heads = ["family", f"note in {newest}", *(f"in {version}, if other" for version in older)]
    for result, heading in _HEADINGS.items():
        names = [family for family, (got, _) in now.items() if got == result]
        rows = [
            [name, now[name][1], *(_other(found[each], name, now[name]) for each in older)]
            for name in names
        ]
        lines += _section(heading, heads, rows)
    gone = [[name, _other(found[each], name, [])] for each in older for name in found[each].families
            if name not in now]  # fmt: skip
    lines += _section("No longer in transformers", ["family", "result"], gone)
    parts = [[name, now[name][0], ", ".join(of)] for name, of in found[newest].parts.items()]
    heads = ["text part", "result", "of the models"]
    lines += _section("Text parts of models of several parts", heads, parts)
    return "\n".join(lines) + "\n"


def _section(heading: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    table = [heads, ["---"] * len(heads), *rows]
    return ["", f"## {heading}", "", *(f"| {_joined(row)} |" for row in table)]


def _joined(cells: Iterable[object]) -> str:
    return " | ".join(map(str, cells))


def _other(survey: Survey, family: str, newest: Sequence[str]) -> str:
    """The cell of an older version: empty if its result is that of the newest."""
    if family not in survey.families:
        return "not there"
    result, note = survey.families[family]
    if [result, note] == [*newest]:
        return ""
    return f"{result}: {note}" if note else result


def quiet() -> None:
    """Silences warnings about tiny configurations."""
    warnings.filterwarnings("ignore")
    hf_logging.set_verbosity_error()
    logging.getLogger("compiled_attn").setLevel(logging.ERROR)


def _note(cache: PagedKVCache) -> str:
    """Properties of the cache of its layers."""
    shapes = cache.shapes
    states = () if cache.states is None else chain.from_iterable(cache.states.shapes)
    kinds = sorted({state.kind for state in states})
    shared = sum(shape.same_as is not None for shape in shapes)
    own = {shape[:3] for shape in shapes}
    notes = {
        f"states: {', '.join(kinds)}": bool(kinds),
        "no attention": not shapes,
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
    """Surveys the installed transformers and writes the page; 1 if any family is wrong."""
    quiet()
    torch.set_num_threads(1)
    families: dict[str, list[str]] = {}
    for family in FAMILIES:
        _, *families[family] = result = survey_family(family)
        print(*result, sep=": ", file=sys.stderr, flush=True)
    survey = Survey(families, text_parts())
    file = _RESULTS / "families" / f"{transformers.__version__}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(survey.to_json())
    PAGE.write_text(page(surveys()))
    return int(bool(survey.counts()["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
