"""Recordings in files: plain numbers, with functions as symbols of libraries.

A process that loads the same libraries can replay them without inductor. Nothing is unpickled.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from graphs.files import read_json
from graphs.torch_internals.replay.recorder import NotReplayable, Output, Recording

__all__ = ["read_recordings", "write_recordings"]

_NUMBERS, _LAYOUT = "graphs.bin", "graphs.json"
_DTYPE = np.dtype("<i8")
_ARRAYS = "words", "at", "base", "offset"


class _Function(NamedTuple):
    """A function as a distance in bytes from a symbol of a library."""

    library: str
    symbol: str
    distance: int


class _Place(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def write_recordings(recordings: Sequence[Recording], entry: int, folder: Path) -> list[Path]:
    """Write recordings to a folder.

    Args:
        recordings: of this process.
        entry: `Replayer.entry` of the replayer that they were recorded for.
        folder: an existing one.

    Returns:
        The libraries that :func:`read_recordings` needs, in this order.

    Raises:
        NotReplayable: a function is in no library.
    """
    libraries: dict[str, int] = {}
    functions: dict[_Function, int] = {}
    layouts = []
    symbols = _Symbols(entry)
    with (folder / _NUMBERS).open("wb") as file:
        for each in recordings:
            words, calls = np.array(each.words, _DTYPE), []
            words[np.asarray(each.at, np.int64)] = 0  # addresses of this process
            for at in _functions_in(words, entry):
                found = symbols.place_of(int(words[at]))
                libraries.setdefault(found.library, len(libraries))
                words[at] = functions.setdefault(found, len(functions))
                calls.append(at)
            arrays = (words, each.at, each.base, each.offset, calls)
            for array in arrays:
                file.write(np.asarray(array, _DTYPE).tobytes())
            layouts.append(
                {
                    "sizes": [len(array) for array in arrays],
                    "inputs": [*map(int, each.inputs)],
                    "arena_bytes": each.arena_bytes,
                    "storages": each.storages,
                    "outputs": [
                        output._asdict() | {"dtype": str(output.dtype).removeprefix("torch.")}
                        for output in each.outputs
                    ],
                }
            )
    table = [[libraries[each.library], each.symbol, each.distance] for each in functions]
    (folder / _LAYOUT).write_text(json.dumps({"functions": table, "graphs": layouts}), "utf-8")
    return [*map(Path, libraries)]


def read_recordings(folder: Path, libraries: Sequence[Path]) -> list[Recording]:
    """Read what :func:`write_recordings` has written; loads the libraries.

    The files must be trusted: a replay calls what they say.

    Raises:
        OSError: a file is missing, or a library does not load.
        ValueError: the files do not fit each other.
    """
    layout = read_json(folder / _LAYOUT)
    loaded = [ctypes.CDLL(str(path)) for path in libraries]
    addresses = np.array([_address(loaded, *each) for each in layout["functions"]], np.int64)
    numbers: Any = np.fromfile(folder / _NUMBERS, _DTYPE).astype(np.int64, copy=False)
    sizes = [graph["sizes"] for graph in layout["graphs"]]
    if sum(map(sum, sizes)) != len(numbers):
        raise ValueError(f"{folder / _NUMBERS} does not have the numbers that {_LAYOUT} describes")
    recordings, start = [], 0
    for graph in layout["graphs"]:
        ends = start + np.cumsum(graph["sizes"])
        words, at, base, offset, calls = np.split(numbers[start : ends[-1]], ends[:-1] - start)
        start = int(ends[-1])
        words[calls] = addresses[words[calls]]
        outputs = [
            Output(
                each["storage"],
                getattr(torch, each["dtype"]),
                each["offset"],
                tuple(each["shape"]),
                tuple(each["stride"]),
            )
            for each in graph["outputs"]
        ]
        recordings.append(
            Recording(
                words,
                at,
                base,
                offset,
                graph["inputs"],
                graph["arena_bytes"],
                graph["storages"],
                outputs,
            )
        )
    return recordings


def _functions_in(words: NDArray[np.int64], entry: int) -> Iterator[int]:
    """Indices of the words that are addresses of functions."""
    at = 0
    while at < len(words):
        is_kernel = words[at + 1] == entry
        size = int(words[at])
        yield at + 1
        if is_kernel:
            yield at + 2
        at += size


class _Symbols:
    """Finds a symbol near each function: its own, or another one of its library.

    Args:
        entry: a function that has a symbol, in the library of the functions that have none.
    """

    def __init__(self, entry: int) -> None:
        self._find = ctypes.CDLL(None).dladdr
        self._find.argtypes = ctypes.c_void_p, ctypes.POINTER(_Place)
        self._entry = self._place(entry)

    def place_of(self, address: int) -> _Function:
        place = self._place(address)
        symbol = place if place.symbol else self._entry
        if not place.file or not symbol.symbol or symbol.file != place.file:
            raise NotReplayable("it calls a function of no library")
        return _Function(place.file.decode(), symbol.symbol.decode(), address - symbol.address)

    def _place(self, address: int) -> _Place:
        place = _Place()
        self._find(address, ctypes.byref(place))
        return place


def _address(loaded: Sequence[ctypes.CDLL], library: int, symbol: str, distance: int) -> int:
    try:
        found = ctypes.cast(loaded[library][symbol], ctypes.c_void_p).value or 0
    except (AttributeError, IndexError) as error:
        raise ValueError(f"library {library} has no function {symbol}: {error}") from error
    return found + distance
