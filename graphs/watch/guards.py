"""Translates Dynamo's guards into words: which condition failed, and the remedy, in one line.

Dynamo names a failed condition in its own terms: `GLOBAL_STATE changed: num_threads`,
`G['FACTOR'] == 2`, a pair of dispatch key sets. An unknown one is returned as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["meaning_of", "readable"]


class Meaning(NamedTuple):
    """A failed guard in words, and the remedy."""

    words: str
    remedy: str


_AS_BEFORE = "warm up with the value that serves, or leave it as it was in the warmup"
_SETTING = "set it before the warmup and leave it alone afterwards"
_GRAD_MODE = "warm up and serve under the same one, such as torch.no_grad()"
_STATE = {
    "grad_mode": ("grad mode changed (no_grad, inference_mode)", _GRAD_MODE),
    "num_threads": ("the thread count changed", f"torch.set_num_threads: {_SETTING}"),
    "default_dtype": ("the default dtype changed", f"torch.set_default_dtype: {_SETTING}"),
    "deterministic_algorithms": ("the determinism setting changed", _SETTING),
    "torch_function": ("torch function overriding was switched on or off", _SETTING),
    "allow_tf32": ("the float32 matmul precision changed", _SETTING),
}
_TENSOR = {
    "size": "pad it to a captured shape, or add its shape to the warmup",
    "rank": "give it the number of dimensions it had in the warmup",
    "dtype": "convert it to the dtype of the warmup, or warm up with this one too",
    "stride": "lay it out as in the warmup (.contiguous()), or warm up with this layout too",
    "requires_grad": "detach it, or warm up with requires_grad as it serves",
}
_MODES = Meaning(
    "a torch function mode was entered or left, such as `with torch.device(...)`",
    "warm up and serve inside the same ones",
)
_TYPE = re.compile(r"^___check_type_id\((.+), \d+\), type=<class '(.+)'>$")
_OBJECT = re.compile(r"^___check_obj_id\((.+?), \d+\)")
_INFERENCE = frozenset({"ADInplaceOrView", "AutogradCPU", "AutogradCUDA", "AutogradMeta"})


def meaning_of(guard: str) -> Meaning:
    """Describe a failed guard and what to do about it."""
    for pattern, meaning in _TABLE:
        if match := pattern.search(guard):
            return meaning(match)
    return Meaning(guard, "capture this case in the warmup")


def readable(guard: str) -> str:
    """A guard that holds, in words: `self.act is a ReLU`."""
    guard = re.sub(r"L\['(\w+)'\]", r"\1", guard)
    if match := _TYPE.search(guard):
        owner, kind = match.groups()
        return f"{_plain(owner)} is a {kind}"
    if match := _OBJECT.search(guard):
        return f"{_plain(match[1])} is the same object"
    return _plain(guard)


def _state(match: re.Match[str]) -> Meaning:
    name = match[1]
    if name.startswith("autocast"):
        return Meaning("autocast was switched on or off", "warm up under the same autocast setting")
    words, remedy = _STATE.get(name, (f"the setting {name} changed", _SETTING))
    return Meaning(words, remedy)


def _tensor(match: re.Match[str]) -> Meaning:
    return Meaning(match[0].strip(), _TENSOR[match[1]])


def _keys(match: re.Match[str]) -> Meaning:
    name, *both = match.groups()
    expected, actual = ([key.strip() for key in keys.split(",")] for keys in both)
    if expected[0] != actual[0]:
        there, here = expected[0].lower(), actual[0].lower()
        return Meaning(
            f"tensor '{name}' is on another device: expected {there}, actual {here}",
            "move it to the device of the warmup, or warm up on this one too",
        )
    changed = set(expected) ^ set(actual)
    if changed and all(key in _INFERENCE or key.startswith("Autograd") for key in changed):
        return Meaning(f"inference mode changed, for this call or for tensor '{name}'", _GRAD_MODE)
    return Meaning(
        f"tensor '{name}' is of another kind ({', '.join(sorted(changed))})",
        "pass the kind of tensor that the warmup had",
    )


def _kind(match: re.Match[str]) -> Meaning:
    found = match[2].rpartition(".")[2].strip("'>")
    return Meaning(f"tensor '{match[1]}' is a {found}", "pass the class of tensor of the warmup")


def _identity(match: re.Match[str]) -> Meaning:
    what = "object" if match[1] == "obj" else "type"
    return Meaning(f"{_plain(match[2])} has another {what}", _AS_BEFORE)


def _contains(match: re.Match[str]) -> Meaning:
    return Meaning(f"whether {match[1]} is in {_plain(match[2])} has changed", _AS_BEFORE)


def _value(match: re.Match[str]) -> Meaning:
    name = _plain(match[1])
    words = f"{name} is no longer {match[2]}"
    if name.startswith("global "):
        return Meaning(words, "leave the global as it was in the warmup, or pass it as a tensor")
    if "." in name or "[" in name or name.startswith("attribute "):
        return Meaning(words, "leave it as it was in the warmup, or make it a tensor (a buffer)")
    return Meaning(words, _AS_BEFORE)


def _plain(expression: str) -> str:
    # Rewrites the path by which Dynamo reaches a value as its owner would write it.
    text = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", expression.strip())
    text = re.sub(r"G\['__import_(\w+?)'\]", lambda m: f"global {m[1].replace('_dot_', '.')}", text)
    text = re.sub(r"G\['(\w+)'\]", r"global \1", text)
    return re.sub(r"^(?:L\['function'\]|function)\.", "attribute ", text)


_TABLE: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Meaning]], ...] = tuple(
    (re.compile(pattern), meaning)
    for pattern, meaning in (
        (r"^GLOBAL_STATE changed: ([\w()]+)", _state),
        (
            r"^tensor '(.+)' dispatch key set mismatch. "
            r"expected DispatchKeySet\((.*)\), actual DispatchKeySet\((.*)\)",
            _keys,
        ),
        (
            r"^tensor '.+' (size|rank|dtype|stride|requires_grad) mismatch[^\n]*?(?=\. Guard|$)",
            _tensor,
        ),
        (r"^expected type of '(.+)' to be .* found <class '(.+)>", _kind),
        (r"^___check_torch_function_mode_stack", lambda _: _MODES),
        (r"^___check_(obj|type)_id\((.+?), \d+\)", _identity),
        (r"^(?:not )?___dict_contains\((.+?), (.+)\)", _contains),
        (r"^(.+?) (?:==|is) ([^=]+)$", _value),
    )
)
