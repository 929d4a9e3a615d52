"""Keys of a prompt's blocks, made of the text of a request before anything tokenizes it."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

__all__ = ["prompt_keys"]

_PARTS = ("tools", "instructions", "messages", "prompt", "input")
"""Fields of the protocol that a prompt is made of, those first that come first in it."""

_CHARACTERS = 64  # about 16 tokens, a block of the cache


def prompt_keys(body: bytes, salt: bytes = b"") -> list[int]:
    """A key for each whole block of 64 characters; two prompts share a key if they are equal up to
    there and of the same salt.

    Args:
        body: of the request, JSON; what is none has no keys, and is refused by the replica.
        salt: of its tenant, who shares no blocks with others.
    """
    text = _text(body)
    keys, before = [], blake2b(salt, digest_size=8).digest()
    for end in range(_CHARACTERS, len(text) + 1, _CHARACTERS):
        before = blake2b(before + text[end - _CHARACTERS : end], digest_size=8).digest()
        keys.append(int.from_bytes(before))
    return keys


def _text(body: bytes) -> bytes:
    try:
        asked: Any = json.loads(body)
        if not isinstance(asked, dict):
            return b""
        return "".join(json.dumps(asked[name]) for name in _PARTS if name in asked).encode()
    except (ValueError, RecursionError):
        return b""
