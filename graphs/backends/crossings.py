"""What crosses between the segments of a callable and its functions marked with `eager_between`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphs.capture.eager_between import cut_by
from graphs.capture.inputs import has_memory, name_of
from graphs.capture.settings import Settings

__all__ = [
    "MarkedCall",
    "MarkedCount",
    "MarkedResult",
    "Observer",
    "address_of",
    "shown",
    "tensors_in",
]


class MarkedCount:
    """Counts the calls of marked functions; a :class:`~graphs.capture.eager_between.Cutter`."""

    calls = 0

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run it."""
        self.calls += 1
        return function(*args, **kwargs)


class MarkedResult(NamedTuple):
    """One leaf of what a marked function returned in the run that was observed.

    Attributes:
        value: what it was.
        kind: `constant`, or a tensor: `made` by the function, a view of an `argument`, or a tensor
            that was there before (`existing`).
        argument: index of that argument among the tensors.
        offset: of the view from the argument's, in elements.
    """

    value: Any
    kind: str
    argument: int = -1
    offset: int = 0


@dataclass(eq=False)
class MarkedCall:
    """A call of a marked function in the run that was observed; addresses are of storages."""

    function: Callable[..., Any]
    given: dict[int, int]  # to the index among tensor arguments
    others: set[int] = field(default_factory=set)  # read, and neither given nor made in this run
    returned: set[int] = field(default_factory=set)
    results: list[MarkedResult] = field(default_factory=list)
    spec: Any = None

    @property
    def name(self) -> str:
        """Name of the function."""
        return name_of(self.function)


class _Owner(NamedTuple):
    call: MarkedCall | None  # None: a segment
    refs: list[ref[Tensor]]


class Observer(TorchDispatchMode):
    """Runs a callable once, and sees which tensors its marked functions and segments exchange.

    Code that is compiled by itself is seen only from outside.

    Args:
        device: the kind of device that is recorded.
        host: inputs on the host by name, which only marked functions may read.
    """

    def __init__(self, device: str, host: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[MarkedCall] = []
        self._device, self._settings = device, Settings.current()
        self._host = {address_of(tensor): name for name, tensor in host.items()}
        self._owners: dict[int, _Owner] = {}
        self._held: list[Tensor] = []  # of marked functions, so that no address is used twice
        self._inside: MarkedCall | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled parts run as compiled."""
        return True

    def run(self, call: Callable[[], Any]) -> None:
        """Run the callable.

        Raises:
            ValueError: something crosses between segments and marked functions that a replay would
                not bring along; or one is called under other settings of torch.
        """
        try:
            with cut_by(self), self:
                outputs = call()
            for tensor in tensors_in(outputs):
                self._expect_returned(tensor, "the callable returns it")
        finally:
            self._owners.clear()
            self._held.clear()

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a marked function."""
        if (now := Settings.current()) != self._settings:
            raise ValueError(
                f"'{name_of(function)}' is called under other settings than the callable "
                f"({now.differences(self._settings)}), which a replay does not enter: enter them "
                "inside the function"
            )
        given = tensors_in((args, kwargs))
        made = MarkedCall(function, {address_of(each): i for i, each in enumerate(given)})
        made.given.pop(0, None)  # of those without memory
        for tensor in given:
            self._expect_returned(tensor, f"it is an argument of '{made.name}'")
        self._inside = made
        try:
            outputs = function(*args, **kwargs)
        finally:
            self._inside = None
        leaves, made.spec = pytree.tree_flatten(outputs)
        made.results = [self._result(made, leaf, given) for leaf in leaves]
        self.calls.append(made)
        return outputs

    def _result(self, call: MarkedCall, leaf: Any, given: Sequence[Tensor]) -> MarkedResult:
        if not isinstance(leaf, Tensor):
            return MarkedResult(leaf, "constant")
        address = address_of(leaf)
        if address in call.given:
            argument = given[call.given[address]]
            if argument.dtype != leaf.dtype:
                raise ValueError(
                    f"'{call.name}' returns a view of an argument with another dtype "
                    f"({shown(leaf)}): return a clone()"
                )
            offset = int(leaf.storage_offset() - argument.storage_offset())
            return MarkedResult(leaf, "argument", call.given[address], offset)
        self._expect_given(call, leaf, "returns")
        if address in call.others:
            return MarkedResult(leaf, "existing")
        call.returned.add(address)
        return MarkedResult(leaf, "made")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        before = {address_of(tensor) for tensor in given}
        result = func(*args, **kwargs)
        results = tensors_in(result)
        if self._inside is not None:
            for tensor in given:
                self._expect_given(self._inside, tensor, f"reads, by {func},")
                if self._owner(address_of(tensor)) is None:
                    self._inside.others.add(address_of(tensor))
        elif not _is_view(func, results, before):
            for tensor in given:
                self._expect_on_device(func, tensor)
                self._expect_returned(tensor, f"{func} reads it")
        for tensor in results:
            self._add(tensor, before)
        return result

    def _add(self, tensor: Tensor, before: set[int]) -> None:
        address = address_of(tensor)
        owner = self._owner(address) if address in before else None
        if not address or (address in before and owner is None):
            return  # it has no memory, or was there before the run
        if owner is None:
            owner = self._owners[address] = _Owner(self._inside, [])
        if owner.call is None:
            owner.refs.append(ref(tensor))
        else:
            self._held.append(tensor)

    def _owner(self, address: int) -> _Owner | None:
        owner = self._owners.get(address)
        is_gone = (
            owner is not None and owner.call is None and all(each() is None for each in owner.refs)
        )
        return None if is_gone else owner

    def _expect_given(self, call: MarkedCall, tensor: Tensor, how: str) -> None:
        owner = self._owner(address_of(tensor))
        if owner is not None and owner.call is None and address_of(tensor) not in call.given:
            raise ValueError(
                f"'{call.name}' {how} {shown(tensor)} that a recorded segment makes and that is "
                "no argument of it: pass it as an argument"
            )

    def _expect_returned(self, tensor: Tensor, how: str) -> None:
        owner = self._owner(address_of(tensor))
        if owner is None or owner.call is None or address_of(tensor) in owner.call.returned:
            return
        raise ValueError(
            f"'{owner.call.name}' makes {shown(tensor)} and does not return it, but {how}: a "
            "replay would read the old one; return it"
        )

    def _expect_on_device(self, func: Any, tensor: Tensor) -> None:
        if tensor.device.type != "cpu" or self._device == "cpu":
            return
        address = address_of(tensor)
        owner = self._owner(address)
        what = f"input '{self._host[address]}'" if address in self._host else ""
        if owner is not None and owner.call is not None:
            what = f"what '{owner.call.name}' returned"
        if what:
            raise ValueError(
                f"{what} is on the host ({shown(tensor)}), and {func} reads it in a recorded "
                "segment, which would keep the old values: read it in a function marked with "
                f"eager_between only, or move it to {self._device}"
            )


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors of a pytree."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def address_of(tensor: Tensor) -> int:
    """The address of the storage of a tensor; 0 if it has no memory."""
    return tensor.untyped_storage().data_ptr() if has_memory(tensor) else 0


def _is_view(func: Any, results: Sequence[Tensor], before: set[int]) -> bool:
    is_written = func._schema.is_mutable
    return bool(results) and not is_written and all(address_of(each) in before for each in results)


def shown(tensor: Tensor) -> str:
    """Describe a tensor for a message."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"a tensor of shape {tuple(tensor.shape)}, {dtype}"
