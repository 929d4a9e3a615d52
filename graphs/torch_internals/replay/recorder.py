"""Records the native calls of a module that inductor wrote, while it runs."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphs.torch_internals.replay.calls import Call, Replayer
from graphs.torch_internals.replay.memory import Allocation, InputMemory, assign_offsets
from graphs.watch.causes import describe_failure

__all__ = ["NotReplayable", "Output", "Recorder", "Recording", "watch_calls"]

_RECORDER: ContextVar[Recorder | None] = ContextVar("recorder of this thread", default=None)

# Parts of what inductor writes.
_ALLOCATE = "empty_strided_cpu"
_KERNELS = re.compile(r"^(\w+) = async_compile\.", re.MULTILINE)
_READS_SIZES = re.compile(r"\w+_(?:size|stride) = \w+\.(?:size|stride)\(\)")


Ints: TypeAlias = Sequence[int] | NDArray[np.int64]


class NotReplayable(Exception):
    """Why a run cannot be repeated from its calls."""


class Output(NamedTuple):
    """A tensor that a graph returns, as a view of one of its output storages.

    Attributes:
        storage: index of the storage.
        dtype, offset, shape, stride: in elements.
    """

    storage: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, storages: Sequence[torch.UntypedStorage]) -> Tensor:
        """The tensor."""
        empty = torch.empty(0, dtype=self.dtype, device="cpu")
        return empty.set_(storages[self.storage], self.offset, self.shape, self.stride)


class Recording(NamedTuple):
    """The calls of a run, and which of their words are addresses.

    Attributes:
        words: each call as a replayer takes it.
        at: indices of the addresses in ``words``.
        base: for each the memory it points into: an index into the inputs that are used, the arena
            and the output storages, in this order.
        offset: for each the bytes from the beginning of that memory.
        inputs: indices of the inputs that are used.
        arena_bytes: for intermediate results.
        storages: bytes of each output storage.
        outputs: what is returned.
    """

    words: Ints
    at: Ints
    base: Ints
    offset: Ints
    inputs: Sequence[int]
    arena_bytes: int
    storages: list[int]
    outputs: list[Output]


def watch_calls(module: ModuleType) -> str:
    """Let recorders see the calls of a module that inductor wrote.

    Inductor caches modules, so a module stays watched; an unrecorded call costs a fraction of a
    microsecond more.

    Returns:
        Why they cannot, or an empty string.
    """
    names = vars(module)
    if _ALLOCATE not in names or not module.__file__:
        return "its module is not as it is known to be"
    code = Path(module.__file__).read_text("utf-8")
    if _READS_SIZES.search(code):
        return "its sizes are not among its inputs"
    kernels = {name: names[name] for name in _KERNELS.findall(code)}
    new = {name: each for name, each in kernels.items() if not isinstance(each, _Kernel)}
    addresses = {name: _address_of(each) for name, each in new.items()}
    if not all(addresses.values()):
        return "its kernels are not bound as they are known to be"
    names.update({name: _Kernel(each, addresses[name]) for name, each in new.items()})
    if not isinstance(names[_ALLOCATE], _Allocator):
        names[_ALLOCATE] = _Allocator(names[_ALLOCATE])
    return ""


def _address_of(kernel: Any) -> int:
    """The address of the function behind one of inductor's bindings; 0: not found."""
    try:
        library = ctypes.CDLL(kernel.__self__.__file__)
        return ctypes.cast(library[kernel.__name__], ctypes.c_void_p).value or 0
    except (AttributeError, OSError):
        return 0


class _Kernel:
    def __init__(self, kernel: Callable[..., Any], address: int) -> None:
        self._kernel, self._address = kernel, address

    def __call__(self, *args: Any) -> Any:
        result = self._kernel(*args)
        if recorder := _RECORDER.get():
            recorder.add_kernel(self._address, args)
        return result


class _Allocator:
    def __init__(self, allocate: Callable[..., Tensor]) -> None:
        self._allocate = allocate

    def __call__(self, *args: Any) -> Tensor:
        made = self._allocate(*args)
        if recorder := _RECORDER.get():
            recorder.add_allocation(made)
        return made


class Recorder(TorchDispatchMode):
    """Records one run of a watched module.

    It sees kernels as the module's globals call them, and ops through the dispatcher; what bypasses
    both only allocates or makes views. Allocations are told apart by address, so it forgets freed
    ones before it notes anything else.

    Args:
        inputs: of the run, sizes and tensors.
        replayer: says how ops record their calls, and how functions are called.
    """

    def __init__(self, inputs: Sequence[Any], replayer: Replayer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._replayer = replayer
        self._inputs = InputMemory(inputs)
        self._last_call: Callable[[], Call | None] = lambda: None
        self._live: list[Allocation] = []
        self._calls: list[tuple[Call, list[tuple[Allocation | int, int]]]] = []
        self._why_not = ""
        for each in inputs:
            if not isinstance(each, Tensor) and type(each) is not int:
                self._refuse(f"it takes a {type(each).__name__}")
            elif isinstance(each, Tensor) and each.device.type != "cpu":
                self._refuse(f"it takes a tensor on {each.device}")

    def record(self, call: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Call a module's function, record it, and return its result."""
        token = _RECORDER.set(self)
        try:
            with self._replayer.recording() as self._last_call, self:
                return call(args)
        finally:
            _RECORDER.reset(token)

    def finish(self, returned: Sequence[Any]) -> Recording:
        """Return the recording of a run that returned `returned`.

        Raises:
            NotReplayable: the run did something that its calls do not repeat.
        """
        if not self._calls:
            self._refuse("it calls nothing")
        if self._why_not:
            raise NotReplayable(self._why_not)
        of_outputs = [self._allocation_of(tensor) for tensor in returned]
        storages = {made: n for n, made in enumerate(dict.fromkeys(of_outputs))}
        used = dict.fromkeys(of for _, origins in self._calls for of, _ in origins)
        inputs = sorted(of for of in used if isinstance(of, int))
        intermediates = {of for of in used if isinstance(of, Allocation) and of not in storages}
        arena_bytes = assign_offsets(intermediates)
        bases: dict[Allocation | int, int] = {of: n for n, of in enumerate(inputs)}
        bases |= dict.fromkeys(intermediates, len(inputs))
        bases |= {of: len(inputs) + 1 + n for of, n in storages.items()}
        words: list[int] = []
        addresses: list[tuple[int, int, int]] = []
        for call, origins in self._calls:
            begin = len(words) + 1
            words += [len(call.words) + 1, *call.words]
            for index, (of, offset) in zip(call.addresses, origins, strict=True):
                offset += of.offset if isinstance(of, Allocation) else 0
                addresses.append((begin + index, bases[of], offset))
        at, base, offsets = ([each[i] for each in addresses] for i in range(3))
        outputs = [
            Output(storages[made], x.dtype, x.storage_offset(), tuple(x.shape), x.stride())
            for made, x in zip(of_outputs, returned, strict=True)
        ]
        sizes = [made.bytes for made in storages]
        return Recording(words, at, base, offsets, inputs, arena_bytes, sizes, outputs)

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self._last_call()  # drops the call of an earlier op
        made = op(*args, **kwargs)
        if getattr(op, "is_view", False):  # which torch before 2.13 may not say
            return made
        call = self._call_of(op, args, kwargs, made)
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, Tensor):
                self.add_allocation(tensor)
        if call is None:
            self._refuse(f"it calls {op}, which records no call")
        else:
            self._add(call)
        return made

    def _call_of(self, op: Any, args: Sequence[Any], kwargs: Any, made: Any) -> Call | None:
        if op._schema.name in self._replayer.ops:
            return self._last_call()
        try:
            return self._replayer.call_of(op, args, kwargs, made)
        except Exception as error:  # the op itself has run
            self._refuse(f"the replayer fails at {op}: {describe_failure(error)}")
            return None

    def add_allocation(self, tensor: Tensor) -> None:
        """Note a tensor that was just made, unless its memory is known."""
        self._forget_freed()
        address = tensor.untyped_storage().data_ptr()
        is_known = address in self._inputs.storages or any(
            made.address == address for made in self._live
        )
        if tensor.untyped_storage().nbytes() and not is_known:
            self._live.append(Allocation(tensor, len(self._calls)))

    def add_kernel(self, address: int, args: Sequence[Any]) -> None:
        """Note a call of the function at an address."""
        words, addresses = [self._replayer.entry, address], []
        for arg in args:
            if isinstance(arg, Tensor):
                if pointer := arg.data_ptr():  # 0 where it is empty
                    addresses.append(len(words))
                words.append(pointer)
            elif type(arg) is int:
                words.append(arg)
            else:
                return self._refuse(f"a kernel takes a {type(arg).__name__}")
        missing = self._replayer.max_args - len(args)
        if missing < 0:
            return self._refuse(f"a kernel takes {len(args)} arguments")
        return self._add(Call([*words, *[0] * missing], addresses))

    def _add(self, call: Call) -> None:
        self._forget_freed()
        origins = []
        for index in call.addresses:
            found = self._find(call.words[index])
            if found is None:
                return self._refuse(
                    "a call takes memory that was not made here, and is not in one input alone"
                )
            origins.append(found)
            if isinstance(found[0], Allocation):
                found[0].end = len(self._calls) + 1
        self._calls.append((call, origins))
        return None

    def _forget_freed(self) -> None:
        self._live = [made for made in self._live if not made.is_freed]

    def _find(self, address: int) -> tuple[Allocation | int, int] | None:
        """The allocation, or index of the input, that contains an address, and the offset."""
        for made in self._live:
            if made.contains(address):
                return made, address - made.address
        return self._inputs.find(address)

    def _allocation_of(self, tensor: Any) -> Allocation:
        if isinstance(tensor, Tensor) and not (tensor.is_conj() or tensor.is_neg()):
            self._forget_freed()
            for made in self._live:
                if made.address == tensor.untyped_storage().data_ptr():
                    return made
        raise NotReplayable("it returns something else than tensors that it made")

    def _refuse(self, why: str) -> None:
        self._why_not = self._why_not or why
