"""Routes requests to the replica with the longest cached prefix, unless it is overloaded."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from compiled_attn.errors import ConfigError

__all__ = ["PrefixRouter", "RecentBlocks", "Route", "prompt_keys"]

_PROMPT_FIELDS = ("tools", "instructions", "messages", "prompt", "input")  # in prompt order
_CHARACTERS = 64  # about 16 tokens, a block of the cache


def prompt_keys(body: bytes, salt: bytes = b"") -> list[int]:
    """Return a key per block of 64 characters, before tokenization.

    Two prompts share a key if they are equal up to the end of the block and have the same salt.

    Args:
        body: of the request, JSON; invalid JSON has no keys.
        salt: of the tenant, who shares no blocks with others.
    """
    text = _prompt_text(body)
    keys, before = [], blake2b(salt, digest_size=8).digest()
    for end in range(_CHARACTERS, len(text) + 1, _CHARACTERS):
        before = blake2b(before + text[end - _CHARACTERS : end], digest_size=8).digest()
        keys.append(int.from_bytes(before))
    return keys


def _prompt_text(body: bytes) -> bytes:
    try:
        request: Any = json.loads(body)
        if not isinstance(request, dict):
            return b""
        parts = (json.dumps(request[name]) for name in _PROMPT_FIELDS if name in request)
        return "".join(parts).encode()
    except (ValueError, RecursionError):
        return b""


class RecentBlocks:
    """An LRU set of block keys, as an estimate of what a replica has cached.

    A key stands for a block and all before it, so a known key means a known prefix.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def shared(self, keys: Sequence[int]) -> int:
        """Return the number of leading keys that are in the set."""
        return next((at for at, key in enumerate(keys) if key not in self._keys), len(keys))

    def use(self, keys: Sequence[int]) -> None:
        """Add the keys of a prompt; later blocks are evicted first."""
        for key in reversed(keys[: self._capacity]):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._capacity:
            self._keys.popitem(last=False)


@dataclass(eq=False)
class _Replica:
    name: Hashable
    recent: RecentBlocks
    load: int = 0
    last_used: int = 0


@dataclass(frozen=True)
class Route:
    """The replica of a request, until `PrefixRouter.done`.

    Attributes:
        replica: its name.
        shared: leading blocks that were sent there before.
        work: its load: new blocks, and one.
    """

    replica: Hashable
    shared: int
    work: int
    _state: _Replica = field(repr=False, compare=False)


class PrefixRouter:
    """Chooses a replica for each request by the blocks that it sent there before.

    Prefers, among replicas below the load limit, the longest shared prefix, then the smallest load,
    then the least recently used. The limit is that of consistent hashing with bounded loads
    (Mirrokni, Thorup and Zadimoghaddam, 2018): ``max_load`` times the mean load including this
    request. Not thread-safe.

    Args:
        max_blocks: keys stored per replica; about the blocks of its cache.
        max_load: limit of the load in multiples of the mean; at least 1.
        min_share: share of a prompt's blocks below which a shared prefix is ignored, such as a
            system prompt that all requests have.

    Raises:
        ConfigError: an argument out of bounds.
    """

    def __init__(
        self, max_blocks: int = 65_536, max_load: float = 1.5, min_share: float = 0.1
    ) -> None:
        if max_blocks < 1 or not max_load >= 1 or not 0 <= min_share <= 1:
            raise ConfigError(
                "expected max_blocks >= 1, max_load >= 1 and min_share in 0..1, got "
                f"{max_blocks}, {max_load} and {min_share}: choose others"
            )
        self._max_blocks, self._max_load, self._min_share = max_blocks, max_load, min_share
        self._replicas: dict[Hashable, _Replica] = {}
        self._requests = 0

    @property
    def loads(self) -> dict[Hashable, int]:
        """Blocks that each replica is computing or has queued."""
        return {name: each.load for name, each in self._replicas.items()}

    def add(self, name: Hashable) -> None:
        """Add a ready replica with an empty cache; a known one is unchanged."""
        if name not in self._replicas:
            self._replicas[name] = _Replica(name, RecentBlocks(self._max_blocks))

    def remove(self, name: Hashable) -> None:
        """Remove a replica that exited."""
        self._replicas.pop(name, None)

    def ranked(self, keys: Sequence[int]) -> list[Hashable]:
        """Return all replicas, best first, for a prompt with these `prompt_keys`."""
        replicas = self._replicas.values()
        load = sum(each.load for each in replicas) + 1 + len(keys)
        limit = self._max_load * load / max(len(replicas), 1)

        def rank(each: _Replica) -> tuple[bool, int, int, int]:
            shared = each.recent.shared(keys)
            counted = shared if shared >= self._min_share * len(keys) else 0
            return each.load >= limit, -counted, each.load, each.last_used

        return [each.name for each in sorted(replicas, key=rank)]

    def take(self, name: Hashable, keys: Sequence[int]) -> Route:
        """Send a prompt to a replica, and count it there until `done`."""
        replica = self._replicas[name]
        self._requests += 1
        shared = replica.recent.shared(keys)
        route = Route(name, shared, 1 + len(keys) - shared, replica)
        replica.recent.use(keys)
        replica.load += route.work
        replica.last_used = self._requests
        return route

    def done(self, route: Route) -> None:
        """Subtract a finished request from the load; call once per route."""
        route._state.load -= route.work
