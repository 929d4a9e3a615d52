"""Recordings that are cut at functions marked with :func:`graphs.eager_between`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphs.backends.crossings import (
    MarkedCall,
    MarkedResult,
    Observer,
    address_of,
    shown,
    tensors_in,
)
from graphs.capture.eager_between import cut_by
from graphs.capture.inputs import name_of
from graphs.errors import CaptureError, quoted

__all__ = ["CutRecording"]


class CutRecording:
    """Records a callable in segments; a replay runs its marked functions between them.

    Args:
        name: of the capture.
        observer: saw the calls of marked functions.
        segment: records what is called inside of it, and yields its graph, which has `replay` and
            `reset`.
    """

    def __init__(
        self, name: str, observer: Observer, segment: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._name, self._new_segment = name, segment
        self._graphs: list[Any] = []
        self._steps: list[Callable[[], None]] = []
        self._next: Iterator[MarkedCall] = iter(observer.calls)
        self._segment = ExitStack()

    def record(self, call: Callable[[], Any]) -> Any:
        """Record the callable and return its outputs; no marked function runs.

        Raises:
            ValueError: it calls other functions than in the run that was observed.
        """
        try:
            with self._segment:
                self._begin()
                with cut_by(self):
                    outputs = call()
            if (missing := next(self._next, None)) is not None:
                raise ValueError(f"{self._differs} '{missing.name}' is not called any more")
        except BaseException:
            self.close()
            raise
        finally:
            self._next = iter(())  # which holds tensors of the run that was observed
        return outputs

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """End the segment, record the call, begin the next segment."""
        seen = next(self._next, None)
        if seen is None or seen.function is not function:
            was = f"was '{seen.name}'" if seen else "is one too many"
            raise ValueError(f"{self._differs} the call of '{name_of(function)}' {was}")
        self._segment.close()
        results = _static_results(seen, tensors_in((args, kwargs)))
        self._steps.append(_Between(self._name, seen, args, kwargs, results))
        self._begin()
        return pytree.tree_unflatten(results, seen.spec)

    def replay(self) -> None:
        """Run the segments and the marked functions in their order."""
        for step in self._steps:
            step()

    def close(self) -> None:
        """Free the graphs and the buffers between them."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self._steps.clear()

    def _begin(self) -> None:
        graph = self._segment.enter_context(self._new_segment())
        self._graphs.append(graph)
        self._steps.append(graph.replay)

    @property
    def _differs(self) -> str:
        return "two runs on the same inputs call different functions marked with eager_between:"


class _Between:
    """One call of a marked function, at every replay."""

    def __init__(
        self,
        name: str,
        seen: MarkedCall,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        outputs: Sequence[Any],
    ) -> None:
        self._name, self._function, self._spec = name, seen.function, seen.spec
        self._args, self._kwargs = args, kwargs
        self._static_results = [
            (r.kind, output) for r, output in zip(seen.results, outputs, strict=True)
        ]

    def __call__(self) -> None:
        with cut_by(None):
            result = self._function(*self._args, **self._kwargs)
        leaves, spec = pytree.tree_flatten(result)
        if spec != self._spec:
            raise self._error(f"{spec}", f"{self._spec}", "return the same structure each time")
        checked = zip(leaves, self._static_results, strict=True)
        copies = [
            (output, leaf) for leaf, (kind, output) in checked if self._moves(leaf, kind, output)
        ]
        for output, leaf in copies:
            output.copy_(leaf)

    def _moves(self, leaf: Any, kind: str, output: Any) -> bool:
        """Whether a result has to be copied; raise if it cannot be what is there."""
        if kind == "constant":
            is_equal = type(leaf) is type(output) and isinstance(leaf, _PLAIN) and leaf == output
            if leaf is output or is_equal:
                return False
            raise self._error(
                quoted(leaf), quoted(output), "what follows was recorded with it: return a tensor"
            )
        if not isinstance(leaf, Tensor) or _layout(leaf) != _layout(output):
            got = shown(leaf) if isinstance(leaf, Tensor) else quoted(leaf)
            raise self._error(
                got, shown(output), "what it returns is copied to a buffer of one shape: pad it"
            )
        if kind == "made":
            return True
        if leaf.data_ptr() == output.data_ptr() and leaf.stride() == output.stride():
            return False
        was = "a view of its argument" if kind == "argument" else "a tensor that it had not made"
        raise self._error(
            f"{shown(leaf)} at another address", was, "return the same each time, or a clone()"
        )

    def _error(self, got: str, recorded: str, remedy: str) -> CaptureError:
        function = name_of(self._function)
        return CaptureError(
            self._name, f"'{function}' returned {got}, recorded {recorded}; {remedy}"
        )


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def _static_results(call: MarkedCall, given: Sequence[Tensor]) -> list[Any]:
    """Placeholders of the results of a call: constants, views of its arguments, static buffers."""
    made = [result.value for result in call.results if result.kind == "made"]
    addresses = [address_of(tensor) for tensor in made]
    shared: dict[int, Tensor] = {}

    def output_of(result: MarkedResult) -> Any:
        value = result.value
        if result.kind == "argument":
            argument = given[result.argument]
            if not result.offset and _geometry(argument) == _geometry(value):
                return argument
            offset = argument.storage_offset() + result.offset
            return argument.as_strided(value.shape, value.stride(), offset)
        if result.kind != "made":
            return value
        address = address_of(value)
        if address and addresses.count(address) > 1:  # results that share memory
            if address not in shared:
                flat = torch.empty(0, dtype=torch.uint8, device=value.device)
                shared[address] = flat.set_(value.untyped_storage()).clone()
            storage = shared[address].untyped_storage()
            empty = torch.empty(0, dtype=value.dtype, device=value.device)
            return empty.set_(storage, value.storage_offset(), value.shape, value.stride())
        return value.clone()

    with torch.inference_mode(False), torch.no_grad():
        return [output_of(result) for result in call.results]


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride()


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device
