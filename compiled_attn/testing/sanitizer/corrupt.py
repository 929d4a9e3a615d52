"""`CorruptCache`, the error of the sanitizer, and the kinds of corruption."""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["KINDS", "CorruptCache"]

KINDS = {
    "use_after_free": "a block that is free, or has too few references, so was freed too early",
    "unwritten_read": "a slot that nothing was written to since its block was allocated",
    "wrong_position": "a slot of the same request, but of another position",
    "wrong_owner": "a slot with the tokens of another request",
    "shared_write": "a block that several requests hold: copy it before writing",
    "two_writers": "a slot of another token: give each token a slot of its own",
    "stale_table": "metadata of another step: update all inputs of a graph before each replay",
    "wrong_layer": "the cache of another layer",
    "padding_write": "a write of a padded token outside of null block 0",
}
"""Kinds of corruption, and what each means."""


class CorruptCache(RuntimeError):
    """A step read or wrote a wrong slot of a paged KV cache.

    Attributes:
        kind: a key of `KINDS`.
        request: the request that was computed; None: padding.
        layer: the layer; None: the whole step.
        block, slot, position: the block, slot and token position; None: unknown.
        step: number of the step, from 1 on.
    """

    def __init__(
        self,
        kind: str,
        step: int,
        did: str,
        *,
        request: Hashable | None = None,
        layer: int | None = None,
        block: int | None = None,
        slot: int | None = None,
        position: int | None = None,
        history: str = "",
    ) -> None:
        self.kind, self.step, self.request, self.layer = kind, step, request, layer
        self.block, self.slot, self.position = block, slot, position
        who = "padding" if request is None else f"request {request!r}"
        location = {"layer": layer, "position": position, "block": block, "slot": slot}
        where = ", ".join(f"{name} {at}" for name, at in location.items() if at is not None)
        super().__init__(
            f"{kind} in step {step}: {who} {did} ({where or 'all layers'})"
            f"{history and '; '}{history}. {kind}: {KINDS[kind]}"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return _restored, (self.args, self.__dict__)


def _restored(args: tuple[object, ...], state: dict[str, object]) -> CorruptCache:
    error = CorruptCache.__new__(CorruptCache, *args)
    error.args = args
    error.__dict__.update(state)
    return error
