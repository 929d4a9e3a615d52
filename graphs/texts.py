"""Text that a user gave: JSON of any kind, read with one short line for an error, and quoted so."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["clipped", "parse_json", "quoted"]


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: it is none, or nested too deeply, or has a number too long to be read; the
            message is one short line.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at column {error.colno}") from None
    except UnicodeDecodeError:
        raise ValueError("not valid JSON: not UTF-8") from None
    except RecursionError:
        raise ValueError("JSON that is nested too deeply to be read") from None
    except ValueError:  # Python's own limit for the digits of an integer
        raise ValueError("JSON with a number of too many digits") from None


def quoted(value: object, most: int = 80) -> str:
    """`repr`, of at most about `most` characters, also of a text that is megabytes long."""
    if isinstance(value, str):
        return repr(value) if len(value) <= most else f"{value[:most]!r}..."
    return clipped(repr(value), most)


def clipped(text: str, most: int) -> str:
    """A text without what is beyond `most` characters, and with `...` in its place."""
    return text if len(text) <= most else f"{text[:most]}..."
