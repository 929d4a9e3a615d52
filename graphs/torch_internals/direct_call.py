"""Calls a graph of Dynamo directly: its guards, then its code, without `torch.compile`'s wrapper.

The wrapper takes longer than the guards, which check everything that the graph depends on in one
native call: inputs, settings of torch, globals, attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from graphs.capture.frozen import DirectCall
from graphs.capture.inputs import Input
from graphs.torch_internals.features import Feature, describe

__all__ = ["DIRECT_CALL", "cheap_calls", "direct_path"]


def direct_path(function: Any, examples: Sequence[Input]) -> DirectCall | None:
    """Return guards and code of a compiled function from `graphs.capture.inputs.with_own_code`.

    Returns None if this torch stores its guards in another way, or if they accept inputs that are
    certainly wrong; the caller then goes through `torch.compile`.
    """
    if not DIRECT_CALL.is_on:
        return None
    try:
        return _direct_path(function, tuple(examples))
    except Exception as error:
        DIRECT_CALL.switch_off(describe(error))
        return None


def cheap_calls() -> AbstractContextManager[object]:
    """Compile for cheap calls.

    Leaves out profiler marks, a microsecond each, and lets guards skip modules whose dictionaries
    have not changed: those of 30 layers took 1.4 ms a call. Tensors are checked in any case, as
    their data can change without a change of the dictionary.
    """
    config = torch._dynamo.config
    settings: dict[str, Any] = {
        "record_runtime_overhead": False,
        "use_recursive_dict_tags_for_guards": True,
        "max_saved_pointers_for_recursive_dict_tags_check": 1 << 16,
    }
    if torch.__version__ < "2.12":
        settings["skip_tensor_guards_with_matching_dict_tags"] = False
    known = {name: value for name, value in settings.items() if hasattr(config, name)}
    patch: AbstractContextManager[object] = config.patch(known)
    return patch


def _direct_path(function: Any, examples: tuple[Input, ...]) -> DirectCall | None:
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    entries = _debug_get_cache_entry_list(function.__code__)
    if len(entries) != 1:
        return None
    guards, code = entries[0].guard_manager, entries[0].code
    check = guards.root.check
    free = {
        name: cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True)
    }
    (name,) = free  # and `inputs` is its only parameter
    called = free[name]
    is_inference = torch.is_inference_mode_enabled
    captured_inference = is_inference()

    def holds(inputs: tuple[Any, ...]) -> bool:
        # Guards lose their entry when an object that they know by address is freed.
        return (
            guards.cache_entry is not None
            and is_inference() is captured_inference
            and check({"inputs": inputs, name: called})
        )

    def why_not(inputs: tuple[Any, ...]) -> str:
        if holds(inputs):
            return ""
        found = guards.root.check_verbose({"inputs": inputs, name: called})
        parts = [str(part).split("  #")[0].strip() for part in found.verbose_code_parts]
        return next(filter(partial(_fails, {"inputs": inputs}), parts), "a guard of the graph")

    with torch.set_grad_enabled(not torch.is_grad_enabled()):
        sees_modes = not holds(examples)
    if not sees_modes or not holds(examples) or holds((*examples, None)):
        return None
    run = FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
    unchecked = [i for i in range(len(examples)) if not _is_guarded(holds, examples, i)]
    return DirectCall(holds, run, tuple(unchecked), why_not)


def _probe() -> str:
    from torch._dynamo import eval_frame

    name = "_debug_get_cache_entry_list"
    return "" if hasattr(eval_frame, name) else f"torch._dynamo.eval_frame has no {name}"


DIRECT_CALL = Feature(
    "direct_call",
    gain="Reaches a graph in 4 us instead of 16: guards and code without torch.compile's wrapper.",
    fallback="Graphs are called through torch.compile's wrapper.",
    versions="2.11 to 2.15",
    files=("graphs/torch_internals/direct_call.py",),
    probe=_probe,
    benchmark="benchmarks/dispatch.py",
)


def _fails(scope: Mapping[str, Any], guard: str) -> bool:
    # Dynamo names all relations of sizes where one of them fails.
    try:
        return not eval(guard, {"L": scope, "torch": torch})
    except Exception:  # names something else
        return True


def _is_guarded(
    holds: Callable[[tuple[Any, ...]], bool], examples: tuple[Input, ...], place: int
) -> bool:
    wrong = _wrong_tensors if isinstance(examples[place], Tensor) else _wrong_constants
    return not any(
        holds((*examples[:place], other, *examples[place + 1 :]))
        for other in wrong(examples[place])
    )


def _wrong_tensors(value: Any) -> Iterator[Input]:
    # Views only, which need no memory.
    yield value.unsqueeze(0)
    if value.numel() > 1:
        yield value.as_strided(value.shape, [0] * value.dim())
    pair = _SAME_SIZE.get(value.element_size(), ())
    yield from (value.view(dtype) for dtype in pair if dtype != value.dtype)
    if value.device.type != "meta":
        yield torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _wrong_constants(value: Any) -> Iterator[Input]:
    yield torch.zeros(())
    yield 0 if value is None else None
    if isinstance(value, str):
        yield value + "_"
    elif value is not None:
        yield type(value)(not value) if isinstance(value, bool) else value + 1
        yield from (kind(value) for kind in (int, float, bool) if _equal_of_other_type(kind, value))


def _equal_of_other_type(kind: type, value: Any) -> bool:
    try:
        return type(value) is not kind and kind(value) == value
    except (ValueError, OverflowError):
        return False


_SAME_SIZE: dict[int, tuple[torch.dtype, ...]] = {
    1: (torch.uint8, torch.int8),
    2: (torch.int16, torch.float16),
    4: (torch.int32, torch.float32),
    8: (torch.int64, torch.float64),
}
