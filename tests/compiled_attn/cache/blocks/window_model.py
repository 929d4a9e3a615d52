"""The naive model of a block pool whose layers all have a sliding window."""

from __future__ import annotations

from tests.compiled_attn.cache.blocks.pool_model import ModelledPool


class WindowedPool(ModelledPool):
    """Also releases blocks; a prefix is found if its blocks in the last window are."""

    def __init__(self, num_blocks: int, size: int, window: int) -> None:
        super().__init__(num_blocks, size, window)
        self.visible = window

    def hits(self, salt: str | None, tokens: list[int]) -> list[int]:
        for end in reversed(range(0, len(tokens), self.size)):
            first = max(0, end - self.visible + 1) // self.size
            ends = range((first + 1) * self.size, end + 1, self.size)
            found = [self.index.get((salt, tuple(tokens[:each]))) for each in ends]
            if None not in found:
                return [0] * first + [block for block in found if block]
        return []

    def release(self, name: str, share: float) -> None:
        row, size = self.rows[name], self.size
        position = round(share * row.computed)
        for number in range(row.released, position // size):
            block, row.blocks[number] = row.blocks[number], 0
            known = {own: content for content, own in self.index.items()} | self.duplicates
            row.contents.append(known.get(block))
            if not self.references()[block]:
                source = self.pending.pop(block, None)
                self.let_go([block] if source is None else [source, block])
            self.counts["released"] += 1
        assert self.pool.release_before(name, position) == (row.released + 1) * size
