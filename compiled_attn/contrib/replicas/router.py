"""The router: to the replica with the longest shared prefix, unless that one has too much to do."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from compiled_attn.contrib.replicas.recent import RecentBlocks
from compiled_attn.errors import ConfigError

__all__ = ["PrefixRouter", "Route"]


@dataclass(eq=False)
class _Replica:
    name: Hashable
    recent: RecentBlocks
    load: int = 0
    chosen: int = 0


@dataclass(frozen=True)
class Route:
    """Where a request went, until `PrefixRouter.done`.

    Attributes:
        replica: that has it.
        shared: leading blocks that were sent there before.
        work: what it adds to the load: blocks that are new there, and one.
    """

    replica: Hashable
    shared: int
    work: int
    _at: _Replica = field(repr=False, compare=False)


class PrefixRouter:
    """Chooses a replica for each request, by the blocks that it sent there before.

    Of the replicas below the limit the one with the longest shared prefix; of equal ones the least
    loaded; of these the one that was chosen least recently. The limit is that of consistent hashing
    with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018): ``most_load`` times the mean
    load with this request, which one replica at least is below. Not for several threads.

    Args:
        most_blocks: keys remembered for each replica; about what its cache holds.
        most_load: times the mean load that a replica may have and still get more; 1 or larger.
        least_share: of a prompt's blocks that must be shared to count. A system prompt that all
            requests begin with says nothing of where to go.

    Raises:
        ConfigError: a number that is out of these bounds.
    """

    def __init__(
        self, most_blocks: int = 65_536, most_load: float = 1.5, least_share: float = 0.1
    ) -> None:
        if most_blocks < 1 or not most_load >= 1 or not 0 <= least_share <= 1:
            raise ConfigError(
                "expected most_blocks >= 1, most_load >= 1 and least_share in 0..1, got "
                f"{most_blocks}, {most_load} and {least_share}: choose others"
            )
        self._most_blocks, self._most_load = most_blocks, most_load
        self._least_share = least_share
        self._replicas: dict[Hashable, _Replica] = {}
        self._taken = 0

    @property
    def loads(self) -> dict[Hashable, int]:
        """Blocks that each replica computes or waits with now."""
        return {name: each.load for name, each in self._replicas.items()}

    def add(self, name: Hashable) -> None:
        """A replica that is ready, with nothing cached; one that is known stays as it is."""
        if name not in self._replicas:
            self._replicas[name] = _Replica(name, RecentBlocks(self._most_blocks))

    def remove(self, name: Hashable) -> None:
        """A replica that has ended, with its cache and all that it had to do."""
        self._replicas.pop(name, None)

    def ranked(self, keys: Sequence[int]) -> list[Hashable]:
        """All replicas, the one to take for a prompt first.

        Args:
            keys: of its blocks, see `prompt_keys`.
        """
        need = 1 + len(keys)
        every = self._replicas.values()
        limit = self._most_load * (sum(each.load for each in every) + need) / max(len(every), 1)

        def rank(each: _Replica) -> tuple[bool, int, int, int]:
            shared = each.recent.shared(keys)
            counted = shared if shared >= self._least_share * len(keys) else 0
            return each.load >= limit, -counted, each.load, each.chosen

        return [each.name for each in sorted(every, key=rank)]

    def take(self, name: Hashable, keys: Sequence[int]) -> Route:
        """A prompt goes to a replica, and counts there from now on."""
        replica = self._replicas[name]
        self._taken += 1
        shared = replica.recent.shared(keys)
        route = Route(name, shared, 1 + len(keys) - shared, replica)
        replica.recent.use(keys)
        replica.load += route.work
        replica.chosen = self._taken
        return route

    def done(self, route: Route) -> None:
        """The request has ended there, however it did; once for each route."""
        route._at.load -= route.work
