"""An engine of the size of nano-vllm: model runner, block manager and scheduler, to read in one go.

    python examples/nano_vllm.py [--model smollm2] [--backend eager]

Many texts are generated at once over one paged cache. A step computes the next tokens of any mix of
them: one token of a text that is being written, a piece of a prompt that is being read. Every step
is padded to one of a few shapes, and each of these is captured before the first request, so that
nothing compiles while serving. The models are Llamas (SmolLM2) and Qwen 3. What is left out of the
whole engine (docs/engine.md): sampling, streams, cancelled requests, and everything that can fail.
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

BLOCK = 32  # tokens in a block of the cache
STEP = 256  # tokens of a step
TEXTS = 16  # texts in a step
GRAPHS = 8  # shapes that are captured
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, TableBatch], Tensor]


# The model: what one step computes. Its weights are those of a model of transformers.


class Decoder(nn.Module):
    """A Llama or Qwen 3 over a paged cache: the tensors of a step -> logits ``[R, vocabulary]``."""

    def __init__(self, source: Any, cache: PagedKVCache, attend: Attend) -> None:
        super().__init__()
        self.model, self.head = source.model, source.lm_head
        self.cache, self.attend = cache, attend
        places = torch.arange(source.config.max_position_embeddings).unsqueeze(0)
        tables = self.model.rotary_emb(torch.ones(1), places)
        self.cos, self.sin = (table[0].chunk(2, -1)[0].contiguous() for table in tables)

    def forward(self, *fields: Tensor) -> Tensor:
        step = TableBatch(*fields)
        x = self.model.embed_tokens(step.input_ids)
        for number, layer in enumerate(self.model.layers):
            x = x + self._attention(number, layer.self_attn, layer.input_layernorm(x), step)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.head(self.model.norm(x[step.logits_index]))

    def _attention(self, number: int, layer: Any, x: Tensor, step: TableBatch) -> Tensor:
        projections = layer.q_proj, layer.k_proj, layer.v_proj
        q, k, v = (each(x).unflatten(-1, (-1, layer.head_dim)) for each in projections)
        if hasattr(layer, "q_norm"):  # Qwen 3
            q, k = layer.q_norm(q), layer.k_norm(k)
        q, k = (
            apply_rotary(each, self.cos, self.sin, step.positions, interleaved=False)
            for each in (q, k)
        )
        pages = self.cache.key_blocks(number), self.cache.value_blocks(number)
        return layer.o_proj(self.attend(q, k, v, *pages, step).flatten(-2))


def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, step: TableBatch):
    """Writes the new keys and values to their slots, and attends each token to all before it."""
    where = step.slot_mapping, step.block_tables, step.seq_lens, step.query_start_loc
    scale = q.shape[-1] ** -0.5
    return torch.ops.compiled_attn.paged_attention_(q, k, v, keys, values, *where, scale)[0]


# The runner: pads steps to the shapes that were captured.


class ModelRunner:
    """The model, its cache, and one captured graph for each shape of a step."""

    def __init__(self, model: Any, blocks: int, context: int, attend: Attend, backend: str) -> None:
        config = model.config
        sizes = config.num_hidden_layers, blocks, BLOCK, config.num_key_value_heads, config.head_dim
        width = -(-context // BLOCK)
        layout = TableLayout(blocks, BLOCK, width)
        buckets = layout.ladder(StepLimits(STEP, TEXTS, width, blocks - 1), GRAPHS)
        load()  # the op: compiled C++, or the same in Python where there is no compiler
        self.module = Decoder(model, PagedKVCache(*sizes, dtype=model.dtype), attend)
        self.layout, self.builder = layout, BatchBuilder(blocks, BLOCK)
        symbolic = layout.symbolic if backend == "inductor" else ()  # one compile for many shapes
        self.graphs = WarmupManager(
            self.module, buckets, layout.padding, backend=backend, symbolic=symbolic
        )
        self.graphs.warmup()

    def run(self, requests: Sequence[Request]) -> list[int]:
        """The most likely token after each request that wants one."""
        plan = self.layout.plan(self.builder.rows_of(requests))
        bucket = self.graphs.bucket(**plan.need)
        logits = self.graphs.run(bucket, *plan.fill(bucket))
        return logits.argmax(-1)[: sum(each.num_logits for each in requests)].tolist()


# The scheduler: who computes what in the next step, on which blocks.


@dataclass(eq=False)
class Text:
    """A text that is being written: its prompt, then what was generated.

    Its keys and values are in the cache up to ``computed``; that it is behind its tokens by one is
    usual, by more: it is still being read.
    """

    name: int
    tokens: list[int]
    end: int  # tokens, with those of the prompt
    computed: int = 0


class Scheduler:
    """Oldest first: the texts that run are served before any that wait."""

    def __init__(self, blocks: int) -> None:
        self.pool = BlockPool(blocks, BLOCK)
        self.waiting: deque[Text] = deque()
        self.running: list[Text] = []

    def schedule(self) -> list[tuple[Text, int]]:
        """Texts with how many of their tokens the next step computes; their blocks are theirs."""
        room, step, at = STEP, [], 0
        while at < len(self.running) and room:
            text = self.running[at]
            count = min(len(text.tokens) - text.computed, room)
            if self._has_room(text, count):
                step.append((text, count))
                room, at = room - count, at + 1
        while self.waiting and room and len(self.running) < TEXTS:
            text = self.waiting[0]
            if not self.pool.can_allocate(len(text.tokens), text.tokens):
                break
            self._admit(self.waiting.popleft())
            count = min(len(text.tokens) - text.computed, room)
            step.append((text, count))
            room -= count
        return step

    def _admit(self, text: Text) -> None:
        """Starts a text at the end of what other texts have left in the cache."""
        text.computed = self.pool.add(text.name, text.tokens).num_computed
        self.pool.reserve(text.name, len(text.tokens))
        self.running.append(text)

    def _has_room(self, text: Text, count: int) -> bool:
        """Makes room for new tokens; where blocks are short, the youngest texts start again."""
        while not self.pool.try_reserve(text.name, text.computed + count):
            youngest = self.running.pop()
            self.pool.preempt(youngest.name)
            self.waiting.appendleft(youngest)
            if youngest is text:
                return False
        return True

    def finish(self, text: Text) -> None:
        """Gives its blocks back; what is in them can be found until they are needed."""
        self.pool.free(text.name)
        self.running.remove(text)


class NanoEngine:
    """Generates greedy texts, as many at once as the cache holds.

    Args:
        model: a Llama or Qwen 3 of transformers.
        blocks: of the cache, with the null block.
        context: tokens of the longest text.
        backend: of the captured graphs.
    """

    def __init__(
        self,
        model: Any,
        blocks: int = 128,
        context: int = 512,
        backend: str = "inductor",
        attend: Attend = attend,
    ) -> None:
        self.context = min(context, (blocks - 1) * BLOCK)
        self.runner = ModelRunner(model, blocks, self.context, attend, backend)
        self.scheduler = Scheduler(blocks)
        given = model.generation_config.eos_token_id
        self.ends = {given} if isinstance(given, int) else set(given or ())

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """At most ``new`` tokens after each prompt.

        Raises:
            ValueError: a prompt is empty, or too long for the context.
        """
        longest = self.context - new
        if any(not 0 < len(prompt) <= longest for prompt in prompts):
            raise ValueError(
                f"expected prompts of 1 to {longest} tokens, got {[*map(len, prompts)]}: cut them, "
                "or make the engine with a longer context"
            )
        texts = [Text(i, [*prompt], len(prompt) + new) for i, prompt in enumerate(prompts)]
        self.scheduler.waiting.extend(texts)
        while step := self.scheduler.schedule():
            self._compute(step)
        return [text.tokens[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]

    def _compute(self, step: Sequence[tuple[Text, int]]) -> None:
        pool = self.scheduler.pool
        requests, writing = [], []
        for text, count in step:
            first, last = text.computed, text.computed + count
            is_read = last == len(text.tokens)
            blocks = pool.table(text.name).blocks
            requests.append(Request(text.tokens[first:last], first, blocks, num_logits=is_read))
            writing += [text] if is_read else []
        new = self.runner.run(requests)
        for text, count in step:
            text.computed += count
            pool.commit(text.name, text.tokens, text.computed)
        for text, token in zip(writing, new, strict=True):
            text.tokens.append(token)
            if token in self.ends or len(text.tokens) == text.end:
                self.scheduler.finish(text)


def prompts_for(model: Any, count: int = 12) -> list[list[int]]:
    """Random prompts of 8 to 140 tokens; the first half of each third one is the same."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(3, model.config.vocab_size, (count, 140), generator=generator).tolist()
    return [(drawn[0][:64] if i % 3 == 0 else []) + drawn[i][: 8 + 6 * i] for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a directory with a Llama or Qwen 3, or smollm2")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--tokens", type=int, default=24, help="of each text")
    options = parser.parse_args()
    model = load_model(options.model) if options.model else default_model()
    engine, prompts = NanoEngine(model, backend=options.backend), prompts_for(model)
    with no_compile() as sentinel:
        texts = engine.generate(prompts, options.tokens)
    for prompt, text in zip(prompts, texts, strict=True):
        print(f"{len(prompt)} tokens: {text}")
    print(f"{len(engine.runner.graphs.buckets)} graphs, {sentinel.compiles} compiles while serving")


if __name__ == "__main__":
    main()
