"""The drafter of one rank: rank 0 chooses and makes the drafts, and all ranks check them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compiled_attn.engine.request_state import RequestState
from compiled_attn.engine.speculation.drafter import Drafter, DraftSource
from compiled_attn.ranks.group import Ranks

__all__ = ["RankDrafter"]


class RankDrafter(Drafter):
    """Broadcasts the drafts of rank 0, as the times that decide on them differ between ranks.

    Args:
        ranks: of the process group.
        source: used on rank 0 only.
        most: tokens of a draft at most.
    """

    def __init__(self, ranks: Ranks, source: DraftSource, most: int) -> None:
        super().__init__(source, most)
        self._ranks = ranks

    def draft(
        self, sequences: Sequence[RequestState], room: int
    ) -> Mapping[RequestState, Sequence[int]]:
        """See `Drafter.draft`; the same on each rank, in the same order.

        Raises:
            RankLost: a rank exited.
        """
        if room < 1:  # the same on each rank
            return super().draft(sequences, room)
        own = None
        if self._ranks.leads:
            drafts = super().draft(sequences, room)
            own = self._idle, [(each.request_id, [*draft]) for each, draft in drafts.items()]
        self._idle, given = self._ranks.broadcast(own)
        by_id = {each.request_id: each for each in sequences}
        return {by_id[name]: draft for name, draft in given}
