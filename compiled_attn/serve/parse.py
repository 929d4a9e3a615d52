"""Parsing of request bodies in worker threads, without holding the GIL for long."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any, TypeVar

from compiled_attn.serve.http_errors import RequestError

__all__ = ["check_unicode", "count_characters", "drop_nulls", "offload", "parse_body"]

Result = TypeVar("Result")

_SCHEMA_FIELDS = ("tools", "response_format", "text")
_LARGE = 1 << 16
_MAX_VALUES, _MAX_ITEMS = 20_000, 300_000
"""Limits of arrays and objects in a body, and of the items in all of them, such as token ids:
validation, error messages and the garbage collector visit them without giving up the GIL."""

# One thread each: more of them would fight with the event loop for the GIL.
_small = ThreadPoolExecutor(1, "serve-small")
_large = ThreadPoolExecutor(1, "serve-large")


async def offload(size: int, work: Callable[..., Result], *given: Any) -> Result:
    """Runs a function off the event loop.

    Inputs of a large ``size`` have a thread of their own, so that small ones do not wait for them.
    """
    pool = _large if size >= _LARGE else _small
    return await asyncio.get_running_loop().run_in_executor(pool, work, *given)


def parse_body(raw: bytes) -> dict[str, Any]:
    """Parses a body; raises RequestError if it is no JSON object, or has too many values."""
    try:
        text = raw.decode()
        body = json.loads(text) if len(raw) < _LARGE else _Decoder(text).decode(text)
    except RecursionError as error:
        raise RequestError(
            "expected a body of few levels, got one that is nested too deep: flatten it"
        ) from error
    except ValueError as error:  # also of bytes that are no UTF-8, and numbers of 5,000 digits
        raise RequestError(f"expected a JSON object, got a body that is none: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(f"expected a JSON object, got a body of {type(body).__name__}")
    return body


class _Decoder(json.JSONDecoder):
    """The decoder in Python: slower than the one in C, which holds the GIL to its end."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._values_left, self._items_left = _MAX_VALUES, _MAX_ITEMS
        own: Any = self
        array, value = own.parse_array, own.parse_object
        own.parse_array = lambda *given: self._counted(array, *given)
        own.parse_object = lambda *given: self._counted(value, *given)
        if text.count("\\") > _LARGE:
            self.parse_string = json.decoder.py_scanstring  # type: ignore[attr-defined]
        self.scan_once = py_make_scanner(self)

    def _counted(self, parse: Callable[..., Any], *given: Any) -> Any:
        self._values_left -= 1
        if self._values_left >= 0:
            found = parse(*given)
            self._items_left -= len(found[0])
        if min(self._values_left, self._items_left) < 0:
            raise RequestError(
                f"expected a body of at most {_MAX_VALUES:,} arrays and objects with "
                f"{_MAX_ITEMS:,} items, got more: send several requests"
            )
        return found


def check_unicode(body: Mapping[str, Any]) -> None:
    """Raises RequestError for half a surrogate pair, which only an escape in JSON can spell."""
    try:
        for text in _strings(body):
            text.encode()
    except UnicodeEncodeError as error:
        raise RequestError("expected valid Unicode, got half a surrogate pair in it") from error


def count_characters(given: Any) -> int:
    """Characters of all strings in parsed JSON, keys included."""
    return sum(map(len, _strings(given)))


def _strings(given: Any) -> Iterator[str]:
    # In Python, and so without holding the GIL as `json.dumps` does.
    left = [given]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            left.extend(each)
            left.extend(each.values())
        elif isinstance(each, list):
            left.extend(each)


def drop_nulls(body: Mapping[str, Any]) -> dict[str, Any]:
    """Removes null fields, which the protocol reads as missing; schemas are not changed."""
    return {
        name: value if name in _SCHEMA_FIELDS else _drop_nulls(value)
        for name, value in body.items()
        if value is not None
    }


def _drop_nulls(given: Any) -> Any:
    if isinstance(given, dict):
        return {name: _drop_nulls(value) for name, value in given.items() if value is not None}
    return [*map(_drop_nulls, given)] if isinstance(given, list) else given
