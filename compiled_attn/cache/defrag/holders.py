"""The holders of each block, as a scheduler with an allocator of its own reports them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

from compiled_attn.arguments import whole
from compiled_attn.cache.blocks.places import BlockPlaces
from compiled_attn.errors import UnknownRequest

__all__ = ["Holders"]


class Holders:
    """Counts the holders of every block and tells ``places`` which blocks are in use.

    Args:
        places: nothing else may change which blocks are in use there.
    """

    def __init__(self, places: BlockPlaces) -> None:
        self._places = places
        self._held: dict[Hashable, list[int]] = {}
        self._counts: dict[int, int] = {}

    def update(
        self,
        new_blocks: Mapping[Hashable, Sequence[int]],
        finished: Iterable[Hashable],
        *,
        missing_ok: bool = False,
    ) -> None:
        """Lets go of all blocks of ``finished``, then adds ``new_blocks``; or raises, unchanged.

        Raises:
            UnknownRequest: a finished request holds nothing here, and ``missing_ok`` is False.
            ValueError: a request finished twice, or got a block it holds or that does not exist.
            TypeError: a block is not an integer.
        """
        done = list(finished)
        if missing_ok:
            done = [request for request in done if request in self._held]
        self._check_finished(done)
        added = {
            request: self._checked(request, new_blocks[request], done) for request in new_blocks
        }
        for request in done:
            for block in self._held.pop(request):
                self._let_go(block)
        for request, blocks in added.items():
            self._held.setdefault(request, []).extend(blocks)
            for block in blocks:
                self._hold(block)

    def _hold(self, block: int) -> None:
        count = self._counts.get(block, 0)
        self._counts[block] = count + 1
        if not count:
            self._places.use(block)

    def _let_go(self, block: int) -> None:
        self._counts[block] -= 1
        if not self._counts[block]:
            del self._counts[block]
            self._places.release(block)

    def _check_finished(self, finished: list[Hashable]) -> None:
        seen: set[Hashable] = set()
        for request in finished:
            if request in seen:
                raise ValueError(
                    f"expected every finished request once, got {request!r} twice: name it once"
                )
            if request not in self._held:
                raise UnknownRequest(request)
            seen.add(request)

    def _checked(
        self, request: Hashable, blocks: Sequence[int], finished: list[Hashable]
    ) -> list[int]:
        held = set() if request in finished else set(self._held.get(request, ()))
        checked = []
        for given in blocks:
            block = whole(f"block of request {request!r}", given, 1)
            if block >= self._places.num_blocks:
                raise ValueError(
                    f"expected blocks < {self._places.num_blocks}, got block {block} for request "
                    f"{request!r}: it is not in this cache"
                )
            if block in held:
                raise ValueError(
                    f"expected new blocks, got block {block}, which request {request!r} holds "
                    "already: report a block once"
                )
            held.add(block)
            checked.append(block)
        return checked
