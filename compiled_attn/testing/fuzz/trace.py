"""Traces: sizes of an engine and a list of operations, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = ["KINDS", "Operation", "Settings", "Trace", "TraceError"]

KINDS = {
    "submit": "queue a request for new_tokens tokens after its prompt",
    "share": "the same; the prompt begins with the first `keep` tokens of request `of`, generated "
    "ones included",
    "fork": "queue `count` continuations of one prompt; their ids are request, request + 1, ...",
    "abort": "abort a request, or all continuations of a fork",
    "step": "run `count` steps",
    "preempt": "preempt a running request",
    "defragment": "compact the cache",
    "draft": "set the number of draft tokens per step to `count`",
}
"""What each operation does."""


class TraceError(ValueError):
    """A trace that cannot be read."""


@dataclass(frozen=True)
class Settings:
    """Sizes of the engine that runs a trace.

    Args:
        family: model family, a name in `compiled_attn.testing.fuzz.models.FAMILIES`.
        block_size: tokens per block.
        num_blocks: blocks for requests, enough for one of ``context`` tokens.
        max_seqs: maximum running requests.
        max_tokens: maximum tokens per step, at least ``max_seqs``.
        context: maximum tokens of a request, prompt and generated.
    """

    family: str = "llama"
    block_size: int = 4
    num_blocks: int = 16
    max_seqs: int = 4
    max_tokens: int = 16
    context: int = 32


@dataclass(frozen=True)
class Operation:
    """One call of an engine; fields that its kind does not use have their defaults.

    Args:
        kind: a name in `KINDS`.
        request: id of the request to submit or abort.
        prompt: token ids; of "share" those after the shared tokens.
        new_tokens: tokens to generate.
        salt: only requests of equal salt share cached prefixes.
        seed: sample at temperature 1 with this seed; None: greedy.
        of: of "share", the request whose tokens the prompt begins with.
        keep: of "share", the number of these tokens.
        count: number of steps, continuations or draft tokens.
    """

    kind: str
    request: int = 0
    prompt: tuple[int, ...] = ()
    new_tokens: int = 0
    salt: str | None = None
    seed: int | None = None
    of: int = 0
    keep: int = 0
    count: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields that differ from their defaults, as JSON values."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        default = {each.name: each.default for each in fields(self)}
        used = {name: value for name, value in found.items() if value != default[name]}
        return used | ({"prompt": list(self.prompt)} if self.prompt else {})


@dataclass(frozen=True)
class Trace:
    """Operations in order, and the settings of the engine that serves them."""

    settings: Settings
    operations: tuple[Operation, ...]

    @property
    def requests(self) -> int:
        """Requests that the operations make, each continuation of a fork counted."""
        made = (each for each in self.operations if each.kind in ("submit", "share", "fork"))
        return sum(each.count for each in made)

    def to_json(self) -> str:
        """Returns JSON, an operation a line."""
        settings = json.dumps(asdict(self.settings))
        lines = ",\n".join(f"  {json.dumps(each.to_dict())}" for each in self.operations)
        return f'{{"settings": {settings},\n "operations": [\n{lines}\n]}}\n'

    @staticmethod
    def from_json(text: str) -> Trace:
        """Reads what `to_json` wrote.

        Raises:
            TraceError: not such a JSON object; an unknown operation, field or type of a value.
        """
        try:
            given = json.loads(text)
        except json.JSONDecodeError as error:
            raise TraceError(f"expected a trace as JSON, got {error}: see Trace.to_json") from error
        if not isinstance(given, dict) or given.keys() != {"settings", "operations"}:
            found = sorted(given) if isinstance(given, dict) else type(given).__name__
            raise TraceError(f"expected an object of settings and operations, got {found}")
        operations = given["operations"]
        if not isinstance(operations, list):
            raise TraceError(f"expected a list of operations, got {type(operations).__name__}")
        return Trace(
            _read(Settings, given["settings"], "settings"),
            tuple(_read(Operation, each, f"operation {n}") for n, each in enumerate(operations)),
        )


def _read(kind: Any, given: Any, where: str) -> Any:
    names = {each.name: type(each.default) for each in fields(kind)}
    if not isinstance(given, Mapping) or not given.keys() <= names.keys():
        found = sorted(given.keys() - names.keys()) if isinstance(given, Mapping) else given
        raise TraceError(f"expected {where} with fields of {sorted(names)}, got {found}")
    values = dict(given)
    if "prompt" in values:
        values["prompt"] = tuple(values["prompt"]) if _is_tokens(values["prompt"]) else None
    for name, value in values.items():
        texts = name in ("kind", "family", "salt")
        right = str if texts else tuple if name == "prompt" else int
        optional = value is None and name in ("salt", "seed")
        if not optional and (not isinstance(value, right) or isinstance(value, bool)):
            raise TraceError(f"expected {right.__name__} as {name} of {where}, got {value!r}")
    if kind is Operation and values.get("kind") not in KINDS:
        raise TraceError(f"expected {where} of {[*KINDS]}, got {values.get('kind')!r}")
    return kind(**values)


def _is_tokens(given: Any) -> bool:
    return isinstance(given, Iterable) and all(type(each) is int for each in given)
