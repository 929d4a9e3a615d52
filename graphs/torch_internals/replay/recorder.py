"""Writes down the native calls of a module that inductor wrote, while it runs."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar, copy_context
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphs.torch_internals.replay.calls import Call, Player
from graphs.torch_internals.replay.liveness import Given, Made, lay_out
from graphs.watch.causes import describe_failure

__all__ = ["NotTaped", "Output", "Recorder", "Recording", "watch_calls"]

_RECORDER: ContextVar[Recorder | None] = ContextVar("recorder of what runs", default=None)

# Of what inductor writes: an allocator, kernels, sizes that are no inputs.
_ALLOCATE = "empty_strided_cpu"
_KERNELS = re.compile(r"^(\w+) = async_compile\.", re.MULTILINE)
_READS_SIZES = re.compile(r"\w+_(?:size|stride) = \w+\.(?:size|stride)\(\)")


class NotTaped(Exception):
    """Why a run cannot be made again from its calls."""


class Output(NamedTuple):
    """A tensor that a graph returns: which of the memories that it makes for them, and what of it.

    Attributes:
        memory: by number.
        dtype, offset, shape, stride: in elements.
    """

    memory: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, memories: Sequence[torch.UntypedStorage]) -> Tensor:
        """The tensor."""
        empty = torch.empty(0, dtype=self.dtype, device="cpu")
        return empty.set_(memories[self.memory], self.offset, self.shape, self.stride)


class Recording(NamedTuple):
    """The calls of a run, and which of their words are addresses of what.

    Attributes:
        words: each call as a player takes it.
        at, base, offset: places of addresses in ``words``; which of inputs, arena and memories of
            outputs, in this order, each is in; how many bytes behind its beginning.
        inputs: places of those inputs that are used.
        arena_bytes: for all that is made on the way.
        memories: bytes of each that outputs are in.
        outputs: what is returned.
    """

    words: list[int]
    at: list[int]
    base: list[int]
    offset: list[int]
    inputs: list[int]
    arena_bytes: int
    memories: list[int]
    outputs: list[Output]


def watch_calls(module: ModuleType) -> str:
    """Lets recorders see what a module that inductor wrote calls by its globals.

    Returns:
        Why they cannot; an empty string where they can. A module is watched for good, as inductor
        keeps those that it loaded; what is not recorded costs it a fraction of a microsecond more.
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
    if not isinstance(names[_ALLOCATE], _Allocate):
        names[_ALLOCATE] = _Allocate(names[_ALLOCATE])
    return ""


def _address_of(kernel: Any) -> int:
    """Where the function behind one of inductor's bindings is; 0: it is not to be found."""
    try:
        library = ctypes.CDLL(kernel.__self__.__file__)
        return ctypes.cast(library[kernel.__name__], ctypes.c_void_p).value or 0
    except (AttributeError, OSError):
        return 0


class _Kernel:
    """A kernel whose calls a recorder sees."""

    def __init__(self, kernel: Callable[..., Any], address: int) -> None:
        self._kernel, self._address = kernel, address

    def __call__(self, *args: Any) -> Any:
        result = self._kernel(*args)
        if recorder := _RECORDER.get():
            recorder.note_kernel(self._address, args)
        return result


class _Allocate:
    """An allocator whose tensors a recorder sees."""

    def __init__(self, allocate: Callable[..., Tensor]) -> None:
        self._allocate = allocate

    def __call__(self, *args: Any) -> Tensor:
        made = self._allocate(*args)
        if recorder := _RECORDER.get():
            recorder.note_memory(made)
        return made


class Recorder(TorchDispatchMode):
    """Records a run of a watched module on its inputs.

    Kernels are seen as the module's globals call them, ops and everything else of torch by the
    dispatcher; what bypasses both allocates, or makes views. Memory is told from other memory by
    where it is, so what is freed is let go before anything else is made.

    Args:
        inputs: of the run, sizes and tensors.
        player: says how ops note their calls, and how functions are called.
    """

    def __init__(self, inputs: Sequence[Any], player: Player) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._player = player
        self._given = Given(inputs)
        self._noted: Callable[[], Call | None] = lambda: None
        self._live: list[Made] = []
        self._calls: list[tuple[Call, list[tuple[Made | int, int]]]] = []
        self._why_not = ""
        for each in inputs:
            if not isinstance(each, Tensor) and type(each) is not int:
                self._refuse(f"it takes a {type(each).__name__}")
            elif isinstance(each, Tensor) and each.device.type != "cpu":
                self._refuse(f"it takes a tensor on {each.device}")

    def record(self, call: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """What a module's call returns of arguments, while it is recorded."""
        context = copy_context()
        context.run(_RECORDER.set, self)
        with self._player.noting() as self._noted, self:
            return context.run(call, args)

    def finish(self, returned: Sequence[Any]) -> Recording:
        """What was recorded of a run that returned this.

        Raises:
            NotTaped: the run did something that its calls do not tell.
        """
        if not self._calls:
            self._refuse("it calls nothing")
        if self._why_not:
            raise NotTaped(self._why_not)
        of_outputs = [self._memory_of(tensor) for tensor in returned]
        outputs = {made: n for n, made in enumerate(dict.fromkeys(of_outputs))}
        used = dict.fromkeys(of for _, places in self._calls for of, _ in places)
        inputs = sorted(of for of in used if isinstance(of, int))
        on_the_way = {of for of in used if isinstance(of, Made) and of not in outputs}
        size = lay_out(on_the_way)
        bases: dict[Made | int, int] = {of: n for n, of in enumerate(inputs)}
        bases |= dict.fromkeys(on_the_way, len(inputs))
        bases |= {of: len(inputs) + 1 + n for of, n in outputs.items()}
        words: list[int] = []
        addresses: list[tuple[int, int, int]] = []
        for call, places in self._calls:
            begin = len(words) + 1
            words += [len(call.words) + 1, *call.words]
            for place, (of, where) in zip(call.addresses, places, strict=True):
                behind = where + (of.offset if isinstance(of, Made) else 0)
                addresses.append((begin + place, bases[of], behind))
        at, base, offset = ([each[i] for each in addresses] for i in range(3))
        memories = [made.bytes for made in outputs]
        told = [
            Output(outputs[made], x.dtype, x.storage_offset(), tuple(x.shape), x.stride())
            for made, x in zip(of_outputs, returned, strict=True)
        ]
        return Recording(words, at, base, offset, inputs, size, memories, told)

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self._noted()  # or else what an op noted before might be taken for a call of this one
        made = op(*args, **kwargs)
        if getattr(op, "is_view", False):  # which torch before 2.13 may not say
            return made
        call = self._call_of(op, args, kwargs, made)
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, Tensor):
                self.note_memory(tensor)
        if call is None:
            self._refuse(f"it calls {op}, which notes no call")
        else:
            self._note(call)
        return made

    def _call_of(self, op: Any, args: Sequence[Any], kwargs: Any, made: Any) -> Call | None:
        if op._schema.name in self._player.ops:
            return self._noted()
        try:
            return self._player.call_of(op, args, kwargs, made)
        except Exception as error:  # what it should describe is done
            self._refuse(f"the player fails at {op}: {describe_failure(error)}")
            return None

    def note_memory(self, tensor: Tensor) -> None:
        """Notes a tensor that was just made, unless its memory was there before."""
        self._let_go()
        address = tensor.untyped_storage().data_ptr()
        was_there = address in self._given.storages or any(
            made.address == address for made in self._live
        )
        if tensor.untyped_storage().nbytes() and not was_there:
            self._live.append(Made(tensor, len(self._calls)))

    def note_kernel(self, address: int, args: Sequence[Any]) -> None:
        """Notes a call of the function at an address."""
        words, addresses = [self._player.entry, address], []
        for arg in args:
            if isinstance(arg, Tensor):
                if where := arg.data_ptr():  # none where it is empty
                    addresses.append(len(words))
                words.append(where)
            elif type(arg) is int:
                words.append(arg)
            else:
                return self._refuse(f"a kernel takes a {type(arg).__name__}")
        missing = self._player.most_words - len(args)
        if missing < 0:
            return self._refuse(f"a kernel takes {len(args)} arguments")
        return self._note(Call([*words, *[0] * missing], addresses))

    def _note(self, call: Call) -> None:
        self._let_go()
        places = []
        for place in call.addresses:
            found = self._find(call.words[place])
            if found is None:
                return self._refuse(
                    "a call takes memory that was not made here, and is not in one input alone"
                )
            places.append(found)
            if isinstance(found[0], Made):
                found[0].end = len(self._calls) + 1
        self._calls.append((call, places))
        return None

    def _let_go(self) -> None:
        self._live = [made for made in self._live if not made.is_gone]

    def _find(self, address: int) -> tuple[Made | int, int] | None:
        """Whose memory an address is in, and how far behind its beginning."""
        for made in self._live:
            if made.has(address):
                return made, address - made.address
        return self._given.find(address)

    def _memory_of(self, tensor: Any) -> Made:
        if isinstance(tensor, Tensor) and not (tensor.is_conj() or tensor.is_neg()):
            self._let_go()
            for made in self._live:
                if made.address == tensor.untyped_storage().data_ptr():
                    return made
        raise NotTaped("it returns something else than tensors that it made")

    def _refuse(self, why: str) -> None:
        self._why_not = self._why_not or why
