"""Reads the header of a GGUF file that may be damaged in any way.

The package gguf trusts the counts and lengths in a file, and would loop or allocate without an end;
so would transformers, which reads a file through it only after this one has. The layout is that of
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; limits are those of llama.cpp.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from compiled_attn.errors import ModelError
from compiled_attn.models.gguf_blocks import FORMATS

__all__ = ["GGUFFile", "GGUFTensor", "fast_readers", "open_gguf"]

_FLOATS: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "F64": np.dtype("<f8"),
}
_SERVED = (*FORMATS, *_FLOATS, "BF16")
_NUMBERS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_MOST_NUMBERS = 1 << 22  # of an array: transformers makes several objects of each


class GGUFTensor(NamedTuple):
    """A tensor of a file.

    Attributes:
        name: in the file.
        kind: its type, such as ``"Q4_K"`` or ``"F32"``.
        data: ``[..., N, K]`` numbers, or ``[..., N, bytes]`` uint8 of blocks and of BF16; mapped.
    """

    name: str
    kind: str
    data: NDArray[Any]


class GGUFFile(NamedTuple):
    """A file: its settings by name, where None stands for arrays, and its tensors."""

    settings: Mapping[str, Any]
    tensors: list[GGUFTensor]

    @property
    def family(self) -> str:
        """The family of the model, as llama.cpp names it."""
        return str(self.settings["general.architecture"])


def open_gguf(file: Path) -> GGUFFile:
    """Maps a file into memory, and checks its header.

    Raises:
        ModelError: it is truncated or damaged, or has a tensor of a type that is not served.
    """
    data: NDArray[np.uint8] = np.empty(0, np.uint8)
    header = _Header(data)
    try:
        if file.stat().st_size:
            data = np.memmap(file, np.uint8, "r")
        header = _Header(data)
        return header.read()
    except _UnknownType as error:
        raise ModelError(f"model {file}: {error}") from error
    except ValueError as error:
        raise ModelError(
            f"model {file}: {header.where}cannot be read ({error}): the file is truncated, "
            "damaged, or of a newer kind: download it again"
        ) from error
    except OSError as error:
        raise ModelError(
            f"model {file}: cannot be read: {error.strerror or error}: give a file that can be"
        ) from error


@contextmanager
def fast_readers() -> Iterator[None]:
    """Context in which transformers reads a GGUF file once, in a third of the time."""
    import gguf

    before = gguf.GGUFReader

    class FastReader(before):  # type: ignore[misc, valid-type]
        """Slices a plain array, as each slice of a `numpy.memmap` runs Python code."""

        @property
        def data(self) -> NDArray[Any]:
            return self._plain

        @data.setter
        def data(self, mapped: NDArray[Any]) -> None:
            self._plain = np.asarray(mapped)  # keeps the mapping alive

    gguf.GGUFReader = functools.cache(FastReader)  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        gguf.GGUFReader = before  # type: ignore[misc]


class _UnknownType(ValueError):
    pass


class _Info(NamedTuple):
    name: str
    kind: str
    shape: list[int]
    begin: int
    size: int


class _Header:
    """A position in a file; ``where``: what is read, for messages."""

    def __init__(self, data: Any) -> None:
        self._data: NDArray[np.uint8] = data
        self._memory, self._at, self.where = memoryview(data), 0, ""

    def read(self) -> GGUFFile:
        if bytes(self._take(4)) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        if (version := self._number("I")) not in (2, 3):
            raise ValueError(f"expected version 2 or 3, got {version}")
        count, keys = self._numbers("QQ")
        values: dict[str, Any] = {}
        self._repeat(keys, 13, lambda: self._add_value(values))
        self.where = ""
        family, alignment = (
            values.get(f"general.{name}", default)
            for name, default in (("architecture", None), ("alignment", 32))
        )
        if not isinstance(family, str):
            raise ValueError("expected the text general.architecture, got none")
        if not isinstance(alignment, int) or alignment.bit_count() != 1:
            raise ValueError(f"expected a power of two as alignment, got {alignment}")
        infos: dict[str, _Info] = {}
        self._repeat(count, 24, lambda: self._add_info(infos, alignment))
        begin = -(-self._at // alignment) * alignment
        return GGUFFile(values, [self._tensor(each, begin) for each in infos.values()])

    def _repeat(self, count: int, least: int, read: Callable[[], object]) -> None:
        """Reads as many things, each of so many bytes at least."""
        if count * least > len(self._data) - self._at:
            self._ends(f"{count:,} entries")
        for _ in range(count):
            read()

    def _ends(self, before: str) -> NoReturn:
        raise ValueError(f"expected {before} from byte {self._at:,}, got {len(self._data):,} bytes")

    def _take(self, count: int) -> memoryview:
        begin, self._at = self._at, self._at + count
        if self._at > len(self._data):
            self._at = begin
            self._ends(f"{count:,} bytes")
        return self._memory[begin : self._at]

    def _numbers(self, forms: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{forms}", self._take(struct.calcsize(f"<{forms}")))

    def _number(self, form: str) -> Any:
        return self._numbers(form)[0]

    def _text(self) -> str:
        return str(self._take(self._number("Q")), "utf-8")

    def _add_value(self, values: dict[str, Any]) -> None:
        self.where = ""
        name = self._text()
        self.where = f"setting {name[:64]!r} "
        if name in values:
            raise ValueError("there are two of this name")
        values[name] = self._value(self._number("I"))

    def _value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            raise ValueError(f"expected a known type, got {kind}")
        item, count = self._numbers("IQ")
        if item == _STRING:
            self._repeat(count, 8, lambda: self._take(self._number("Q")))
        elif item not in _NUMBERS or count > _MOST_NUMBERS:
            raise ValueError(
                f"expected at most {_MOST_NUMBERS:,} numbers or texts, got {count:,} of type {item}"
            )
        else:
            self._take(count * struct.calcsize(_NUMBERS[item]))
        return None

    def _add_info(self, infos: dict[str, _Info], alignment: int) -> None:
        self.where = ""
        name = self._text()
        self.where = f"tensor {name[:64]!r} "
        if name in infos:
            raise ValueError("there are two of this name")
        if not 1 <= (dimensions := self._number("I")) <= _MOST_DIMENSIONS:
            raise ValueError(f"expected 1 to {_MOST_DIMENSIONS} dimensions, got {dimensions:,}")
        shape = [self._number("Q") for _ in range(dimensions)][::-1]
        kind = _name_of_type(self._number("I"))
        if kind not in _SERVED:
            raise _UnknownType(
                f"tensor {name} is of type {kind}, expected one of {', '.join(_SERVED)}: use a "
                "file of one of these"
            )
        per_block, size = _block_of(kind)
        if not all(shape) or shape[-1] % per_block:
            raise ValueError(
                f"expected a positive number of rows of whole blocks of {per_block}, got {shape}"
            )
        size *= math.prod(shape) // per_block
        last = next(reversed(infos.values()), None)
        expected = 0 if last is None else -(-(last.begin + last.size) // alignment) * alignment
        if (begin := self._number("Q")) != expected:
            raise ValueError(f"expected it at {expected:,}, after the previous one, got {begin:,}")
        infos[name] = _Info(name, kind, shape, begin, size)

    def _tensor(self, info: _Info, begin: int) -> GGUFTensor:
        self.where = f"tensor {info.name} "
        self._at = begin + info.begin
        if self._at + info.size > len(self._data):
            self._ends(f"{info.size:,} bytes")
        data = self._data[self._at : self._at + info.size].view(_FLOATS.get(info.kind, np.uint8))
        return GGUFTensor(info.name, info.kind, data.reshape(*info.shape[:-1], -1))


def _block_of(kind: str) -> tuple[int, int]:
    """Numbers and bytes of a block."""
    if kind in FORMATS:
        return FORMATS[kind].numbers, FORMATS[kind].bytes
    return 1, _FLOATS[kind].itemsize if kind in _FLOATS else 2


def _name_of_type(number: int) -> str:
    from gguf import GGMLQuantizationType

    try:
        return GGMLQuantizationType(number).name
    except ValueError:
        return str(number)
