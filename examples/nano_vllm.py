"""An engine of the size of nano-vllm, to read in one go.

    python examples/nano_vllm.py [--model smollm2] [--backend eager]

Start here. The file follows a request from the top down:

1. `NanoEngine.generate` runs steps until every sequence is finished.
2. `Scheduler` decides how many tokens of which sequences a step computes, and on which blocks.
3. `ModelRunner` pads the step into a bucket and runs the graph that was captured for it.
4. `Decoder` is that graph: a Llama or Qwen 3 whose attention reads and writes a paged cache.

A step mixes decodes (one token of a sequence) and chunks of prompts. Its shape is one of a few
buckets, each captured before the first request, so nothing compiles while serving. The full engine
(docs/reference/engine.md) adds sampling, streams, cancellation, devices and recovery from errors.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compiled_attn import BatchBuilder, PagedKVCache, Request, apply_rotary
from compiled_attn.cache.blocks import BlockPool
from compiled_attn.models import default_model, load_model
from compiled_attn.ops import load
from compiled_attn.step import StepLimits, TableBatch, TableLayout
from graphs import WarmupManager, no_compile

BLOCK = 32  # tokens per cache block
STEP = 256  # tokens per step
RUNNING = 16  # sequences per step
GRAPHS = 8  # buckets
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, TableBatch], Tensor]


# 1. The engine


@dataclass(eq=False)
class Generation:
    """One sequence: its prompt, then what was generated.

    Keys and values of the first ``computed`` tokens are cached. A sequence whose last token alone
    is missing decodes; otherwise its prompt is still being computed.
    """

    id: int
    tokens: list[int]
    max_length: int
    computed: int = 0


class NanoEngine:
    """Generates greedily, as many sequences at once as the cache holds.

    Args:
        model: a Llama or Qwen 3 of transformers.
        blocks: cache blocks, including the null block.
        context: longest prompt plus generation, in tokens.
        backend: captures the graphs.
        attend: attention of the model; None: `attend_paged`.
    """

    def __init__(
        self,
        model: Any,
        blocks: int = 128,
        context: int = 512,
        backend: str = "inductor",
        attend: Attend | None = None,
    ) -> None:
        self.context = min(context, (blocks - 1) * BLOCK)
        self.runner = ModelRunner(model, blocks, self.context, attend or attend_paged, backend)
        self.scheduler = Scheduler(blocks)
        eos = model.generation_config.eos_token_id
        self.eos = {eos} if isinstance(eos, int) else set(eos or ())

    def generate(self, prompts: Sequence[Sequence[int]], max_new: int) -> list[list[int]]:
        """Returns at most ``max_new`` tokens for each prompt.

        Raises:
            ValueError: a prompt is empty or too long for the context.
        """
        longest = self.context - max_new
        if any(not 0 < len(prompt) <= longest for prompt in prompts):
            raise ValueError(
                f"expected prompts of 1 to {longest} tokens, got {[*map(len, prompts)]}: shorten "
                "them, or make the engine with a longer context"
            )
        sequences = [Generation(i, [*p], len(p) + max_new) for i, p in enumerate(prompts)]
        self.scheduler.waiting.extend(sequences)
        while step := self.scheduler.schedule():
            self._run(step)
        return [s.tokens[len(p) :] for s, p in zip(sequences, prompts, strict=True)]

    def _run(self, step: Sequence[tuple[Generation, int]]) -> None:
        pool = self.scheduler.pool
        requests, decoding = [], []
        for sequence, count in step:
            start, end = sequence.computed, sequence.computed + count
            needs_logits = end == len(sequence.tokens)  # a chunk within a prompt needs none
            blocks = pool.table(sequence.id).blocks
            new = sequence.tokens[start:end]
            requests.append(Request(new, start, blocks, num_logits=needs_logits))
            decoding += [sequence] if needs_logits else []
        sampled = self.runner.run(requests)
        for sequence, count in step:
            sequence.computed += count
            pool.commit(sequence.id, sequence.tokens, sequence.computed)  # later prompts find it
        for sequence, token in zip(decoding, sampled, strict=True):
            sequence.tokens.append(token)
            if token in self.eos or len(sequence.tokens) == sequence.max_length:
                self.scheduler.finish(sequence)


# 2. The scheduler


class Scheduler:
    """First come, first served: running sequences before waiting ones.

    `BlockPool` owns the blocks: it allocates them, shares those of equal prefixes, and evicts
    cached ones when none are free.
    """

    def __init__(self, blocks: int) -> None:
        self.pool = BlockPool(blocks, BLOCK)
        self.waiting: deque[Generation] = deque()
        self.running: list[Generation] = []

    def schedule(self) -> list[tuple[Generation, int]]:
        """Returns the sequences of the next step, each with how many tokens to compute."""
        step: list[tuple[Generation, int]] = []
        budget = STEP
        for sequence in [*self.running]:
            count = min(len(sequence.tokens) - sequence.computed, budget)
            if count and sequence in self.running and self._reserve(sequence, count):
                step.append((sequence, count))
                budget -= count
        while self.waiting and budget and len(self.running) < RUNNING:
            sequence = self.waiting[0]
            if not self.pool.can_allocate(len(sequence.tokens), sequence.tokens):
                break
            self._admit(self.waiting.popleft())
            count = min(len(sequence.tokens) - sequence.computed, budget)
            step.append((sequence, count))
            budget -= count
        return step

    def _admit(self, sequence: Generation) -> None:
        """Starts a sequence after the part of it that is in the prefix cache."""
        sequence.computed = self.pool.add(sequence.id, sequence.tokens).num_computed
        self.pool.reserve(sequence.id, len(sequence.tokens))
        self.running.append(sequence)

    def _reserve(self, sequence: Generation, count: int) -> bool:
        """Reserves blocks for new tokens; preempts the newest sequences where none are free."""
        while not self.pool.try_reserve(sequence.id, sequence.computed + count):
            newest = self.running.pop()
            self.pool.preempt(newest.id)
            self.waiting.appendleft(newest)  # computed again later, with the same tokens
            if newest is sequence:
                return False
        return True

    def finish(self, sequence: Generation) -> None:
        """Frees the blocks; their contents stay in the prefix cache until they are evicted."""
        self.pool.free(sequence.id)
        self.running.remove(sequence)


# 3. The runner


class ModelRunner:
    """The model, its cache, and a captured graph for each bucket."""

    def __init__(self, model: Any, blocks: int, context: int, attend: Attend, backend: str) -> None:
        config = model.config
        shape = config.num_hidden_layers, blocks, BLOCK, config.num_key_value_heads, config.head_dim
        width = -(-context // BLOCK)  # blocks of the longest sequence
        load()  # the op: compiled C++, or its Python reference where there is no compiler
        self.module = Decoder(model, PagedKVCache(*shape, dtype=model.dtype), attend)
        self.layout, self.builder = TableLayout(blocks, BLOCK, width), BatchBuilder(blocks, BLOCK)
        buckets = self.layout.ladder(StepLimits(STEP, RUNNING, width, blocks - 1), GRAPHS)
        symbolic = self.layout.symbolic if backend == "inductor" else ()  # buckets share a compile
        self.graphs = WarmupManager(
            self.module, buckets, self.layout.padding, backend=backend, symbolic=symbolic
        )
        self.graphs.warmup()

    def run(self, requests: Sequence[Request]) -> list[int]:
        """Returns the most likely next token of each request that needs logits."""
        plan = self.layout.plan(self.builder.rows_of(requests))
        bucket = self.graphs.bucket(**plan.need)  # the cheapest that holds the step
        logits = self.graphs.run(bucket, *plan.fill(bucket))  # [rows, vocabulary]
        return logits.argmax(-1)[: sum(each.num_logits for each in requests)].tolist()


# 4. The graph


class Decoder(nn.Module):
    """A Llama or Qwen 3 over a paged cache: tensors of a step -> logits ``[R, vocabulary]``."""

    def __init__(self, source: Any, cache: PagedKVCache, attend: Attend) -> None:
        super().__init__()
        self.model, self.head = source.model, source.lm_head
        self.cache, self.attend = cache, attend
        positions = torch.arange(source.config.max_position_embeddings).unsqueeze(0)
        tables = self.model.rotary_emb(torch.ones(1), positions)
        self.cos, self.sin = (table[0].chunk(2, -1)[0].contiguous() for table in tables)

    def forward(self, *fields: Tensor) -> Tensor:
        step = TableBatch(*fields)
        x = self.model.embed_tokens(step.input_ids)  # [T, hidden], all sequences flattened
        for index, layer in enumerate(self.model.layers):
            x = x + self._attention(index, layer.self_attn, layer.input_layernorm(x), step)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.head(self.model.norm(x[step.logits_index]))

    def _attention(self, index: int, layer: Any, x: Tensor, step: TableBatch) -> Tensor:
        projections = layer.q_proj, layer.k_proj, layer.v_proj
        q, k, v = (each(x).unflatten(-1, (-1, layer.head_dim)) for each in projections)
        if hasattr(layer, "q_norm"):  # Qwen 3
            q, k = layer.q_norm(q), layer.k_norm(k)
        q, k = (
            apply_rotary(each, self.cos, self.sin, step.positions, interleaved=False)
            for each in (q, k)
        )
        caches = self.cache.key_blocks(index), self.cache.value_blocks(index)
        return layer.o_proj(self.attend(q, k, v, *caches, step).flatten(-2))


def attend_paged(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, step: TableBatch
) -> Tensor:
    """Writes new keys and values to their slots; each token attends to all earlier ones."""
    where = step.slot_mapping, step.block_tables, step.seq_lens, step.query_start_loc
    scale = q.shape[-1] ** -0.5
    return torch.ops.compiled_attn.paged_attention_(q, k, v, keys, values, *where, scale)[0]


def prompts_for(model: Any, count: int = 12) -> list[list[int]]:
    """Random prompts of 8 to 140 tokens; every third one starts with the same 64."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, model.config.vocab_size, (count, 140), generator=generator).tolist()
    return [(tokens[0][:64] if i % 3 == 0 else []) + tokens[i][: 8 + 6 * i] for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a directory with a Llama or Qwen 3, or smollm2")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--tokens", type=int, default=24, help="new tokens per prompt")
    options = parser.parse_args()
    model = load_model(options.model) if options.model else default_model()
    engine, prompts = NanoEngine(model, backend=options.backend), prompts_for(model)
    with no_compile() as sentinel:
        generated = engine.generate(prompts, options.tokens)
    for prompt, tokens in zip(prompts, generated, strict=True):
        print(f"{len(prompt)} tokens: {tokens}")
    print(f"{len(engine.runner.graphs.buckets)} graphs, {sentinel.compiles} compiles while serving")


if __name__ == "__main__":
    main()
