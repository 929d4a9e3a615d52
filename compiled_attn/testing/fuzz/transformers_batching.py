"""Continuous batching of transformers as a target of the fuzzer, stepped without its thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from compiled_attn.testing.fuzz.models import FAMILIES, DenseReference, tiny_model
from compiled_attn.testing.fuzz.target import Refused, Target
from compiled_attn.testing.fuzz.trace import Settings

__all__ = ["TransformersBatching"]


class TransformersBatching(Target):
    """`ContinuousBatchingManager`; ``attention`` is "sdpa" or "paged|eager". With
    ``avoid_known`` it works around what is known to fail (see docs/reference/fuzz.md).
    """

    supports: ClassVar = frozenset(["abort", "fork"])
    block_sizes: ClassVar = (4, 5, 8, 16)  # it requires 4 tokens
    families: ClassVar = tuple(FAMILIES)

    def __init__(
        self, settings: Settings, attention: str = "sdpa", avoid_known: bool = True, **config: Any
    ) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        super().__init__(settings)
        self.reference, self.model = DenseReference.of(settings.family), tiny_model(settings.family)
        self.model.set_attn_implementation(attention)
        room = 2 if settings.family == "gemma3_text" else 0  # two kinds of layers, each with blocks
        sizes = ContinuousBatchingConfig(
            page_size=settings.block_size, num_blocks=settings.num_blocks + room,
            max_batch_tokens=settings.max_tokens, max_requests_per_batch=settings.max_seqs,
            use_async_batching=False, auto_switch_to_flash=False, seed=0, **config,
        )  # fmt: skip
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        self.avoids_known = avoid_known
        self.manager = self.model.init_continuous_batching(greedy, sizes)
        self.processor = self.manager._create_batch_processor()
        self._tokens: dict[int, list[int]] = {}

    def submit(self, request: int, prompt: Sequence[int], new_tokens: int, *, count: int = 1,
               **_: Any) -> None:  # fmt: skip
        """Its children are named after the request."""
        if count > 1 and len(prompt) % self.settings.block_size == 1 and self.avoids_known:
            raise Refused("transformers 5.24 crashes when a prompt forks with one token to compute")
        self.manager.num_return_sequences = count
        self.manager.add_request([*prompt], f"{request}", new_tokens, streaming=True)

    def step(self) -> Mapping[int, Sequence[int]]:
        """One turn of its loop; raises for a request that failed."""
        scheduler = self.processor.scheduler
        if self.avoids_known and not scheduler.active_requests:  # an abort leaves it, and all wait
            scheduler.block_new_requests = False
        if self.processor.prepare_next_batch():
            self.processor._generation_step(self.model)
            self.processor.update_batch()
        new: dict[int, list[int]] = {}
        while not (outputs := self.manager.output_router.output_queue).empty():
            output = outputs.get()
            name, _, child = output.request_id.partition("__child#")
            request = int(name) + (int(child) + 1 if child else 0)
            before, now = self._tokens.get(request, []), output.generated_tokens
            if output.error or now[: len(before)] != before:
                raise RuntimeError(f"request {request} had {before}, got {now}, {output.error}")
            new.setdefault(request, []).extend(now[len(before) :])
            self._tokens[request] = now
        return new

    def abort(self, request: int, count: int) -> None:
        """Takes effect in the next step."""
        for name in (f"{request}", *(f"{request}__child#{n}" for n in range(count - 1))):
            self.manager.cancel_request(name)

    def check(self, is_idle: bool) -> str:
        """Idle, it has no request, and every byte is free or cached."""
        if not is_idle:
            return ""
        self.processor.prepare_next_batch()  # applies aborts
        cache = self.processor.cache
        free = cache.compute_free_capacity(relative=False)
        for each in cache.cache_allocators.values():
            free += len(each.ledger.cached_blocks) * each.bytes_per_block
        total = cache.num_sectors * cache.bytes_per_sector
        if free == total and not self.processor.has_pending_requests():
            return ""
        return f"{free} of {total} bytes are free while idle, or a request is open"
