"""A small engine over `BlockPool` whose continuations fork: they share blocks until one writes."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from compiled_attn import BatchBuilder, PagedKVCache, Request, UnifiedAttention
from compiled_attn.cache.blocks import BlockPool
from compiled_attn.cache.defrag import BlockSwap
from compiled_attn.testing import StepTokens, kv_sanitizer
from compiled_attn.testing.fuzz import Settings
from tests.compiled_attn.testing.fuzz.toy import Toy, next_token

DIM = 8


class Forks(Toy):
    """Its model hashes the tokens that it reads in the keys of the cache.

    A request is its text, how many tokens are to go, and the ids of its other continuations.
    """

    supports = frozenset(["abort", "fork", "preempt"])

    def __init__(self, settings: Settings, sanitize: bool = False) -> None:
        super().__init__(settings)
        blocks, size = settings.num_blocks + 1, settings.block_size
        self.pool = BlockPool(blocks, size, key=b"fuzz")
        self.keys = PagedKVCache(1, blocks, size, 1, DIM)
        self.context = ExitStack()
        self.watch = None
        if sanitize:
            sizes = {"max_requests": settings.max_seqs, "max_tokens": blocks * size}
            self.watch = self.context.enter_context(kv_sanitizer(self.keys, **sizes))
        self.layer = UnifiedAttention(self.keys, kernel="portable")
        self.builder = BatchBuilder(blocks, size)
        self.copies = BlockSwap(self.keys, pad_sizes=(4,), exchanges=False)
        self.copies.warmup()

    def submit(self, request, prompt, new_tokens, *, count=1, **_):
        self.waiting[request] = [[*prompt], new_tokens, [*range(request + 1, request + count)]]

    def abort(self, request, count):
        for name in range(request, request + count):
            if name in self.running:
                self.release(name)
                del self.running[name]
            self.waiting.pop(name, None)

    def step(self):
        while self.waiting and len(self.running) < self.settings.max_seqs:
            name = next(iter(self.waiting))
            if not self.pool.can_allocate(len(self.waiting[name][0]), self.waiting[name][0]):
                break
            self.running[name] = self.waiting.pop(name)
            self.pool.add(name, self.running[name][0])
        for name in [*self.running]:
            while name in self.running and not self.reserved(name):
                self.preempt()
        pairs = self.pool.pending_copies()
        self.copies.move(pairs)
        self.pool.copied(pairs)
        if self.running:
            self.write()
        tokens: dict[int, list[int]] = {}
        for name in [*self.running]:
            self.decode(name, tokens)
        return tokens

    def reserved(self, name):
        table = self.pool.table(name)
        before = [*table.blocks]
        is_reserved = self.pool.try_reserve(name, max(table.length, len(self.running[name][0])))
        if self.watch and (added := [each for each in table.blocks if each not in before]):
            self.watch.free(added)  # whoever had them before
        return is_reserved

    def write(self):
        parts, requests = [], []
        for name, (text, *_) in self.running.items():
            table = self.pool.table(name)
            start = table.num_computed
            parts.append(StepTokens(name, text, start, len(text) - start, [*table.blocks]))
            requests.append(Request(text[start:], start, table.array[: len(table.blocks)].copy()))
        if self.watch:
            self.watch.step(parts)
        batch = self.builder.build(requests)
        rows = torch.zeros(len(batch.input_ids), 1, DIM)
        rows[:, 0, 0] = batch.input_ids
        self.layer(rows, rows, rows, batch.metadata(self.size))
        if self.watch:
            self.watch.check()

    def decode(self, name, tokens):
        text, _, children = request = self.running[name]
        table = self.pool.table(name)
        blocks = torch.tensor(table.array[: len(table.blocks)])
        keys = self.keys.key_blocks(0)[blocks, :, 0, 0].flatten()[: len(text)]
        token = next_token([int(each) for each in keys])
        self.pool.commit(name, text, len(text))
        prompt = [*text]
        text.append(token)
        request[1] -= 1
        tokens[name] = [token]
        request[2] = []
        for child in children:
            if request[1] and len(self.running) < self.settings.max_seqs:
                self.pool.fork(name, child)
                self.running[child] = [[*text], request[1], []]
                tokens[child] = [token]
            else:
                self.waiting[child] = [[*prompt], request[1] + 1, []]
        if not request[1]:
            self.release(name)
            del self.running[name]

    def preempt(self):
        if self.running:
            name = next(reversed(self.running))
            self.release(name)
            self.waiting = {name: self.running.pop(name), **self.waiting}

    def release(self, name, leaks=False):
        before = self.pool.free_mask()
        self.pool.free(name)
        if self.watch:
            self.watch.free((self.pool.free_mask() & ~before).nonzero()[0])

    def check(self, is_idle):
        stats, refs = self.pool.stats(), self.pool.refcounts
        held = sum(len(self.pool.table(name).blocks) for name in self.pool.requests)
        is_whole = stats.used + stats.cached + stats.free == stats.total and held == refs.sum()
        return "" if is_whole and not (is_idle and stats.used) else f"{held} blocks held: {stats}"

    def counts(self):
        return {"copies": self.pool.stats().copies}

    def close(self):
        self.context.close()
