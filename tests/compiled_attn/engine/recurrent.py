"""A small model with a convolution, a recurrence and attention, and an executor of it in torch.

`Recurrent.tokens_of` computes a text at once in float64; the executor computes steps in float32
from slots and blocks, all of which hold NaN at first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_attn.cache.kv_cache import PagedKVCache
from compiled_attn.cache.state_cache import StateCache, StateShape
from compiled_attn.engine import Engine, EngineConfig
from compiled_attn.engine.cache_size import StateSize
from compiled_attn.engine.executor import ExecutorReport, PlannedStep
from compiled_attn.engine.sampler import logits_needed, sample_step
from compiled_attn.engine.sizing import Sizing
from compiled_attn.ops import load
from compiled_attn.step import BatchBuilder, StateTableBatch, StepLimits, TableLayout
from graphs import BucketOverflow, WarmupReport
from tests.compiled_attn.engine.counting import sum_of_sizes

VOCAB, DIM, BLOCK, TAPS = 41, 8, 4, 3
NAN_TOKEN = VOCAB - 1
"""A token whose embedding is NaN."""


class Recurrent:
    """The model: embeddings, one layer with all three kinds of memory, and logits."""

    def __init__(self, seed: int = 0) -> None:
        made = torch.Generator().manual_seed(seed)
        self.embedding = torch.randn(VOCAB, DIM, generator=made, dtype=torch.float64)
        self.embedding[NAN_TOKEN] = torch.nan
        self.into = torch.randn(5, DIM, DIM, generator=made, dtype=torch.float64)
        self.taps = torch.randn(TAPS, DIM, generator=made, dtype=torch.float64)
        self.head = torch.randn(DIM, VOCAB - 1, generator=made, dtype=torch.float64)

    def inputs(self, tokens: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Returns x, query, key, value and decay ``[T, DIM]`` of tokens."""
        x = self.embedding.to(dtype)[tokens]
        query, key, value, gate = (torch.tanh(x @ weight.to(dtype)) for weight in self.into[:4])
        return x, query, key, value, torch.exp(-torch.nn.functional.softplus(gate))

    def logits(self, *parts: Tensor) -> Tensor:
        """Returns logits of the sum of the layer's three outputs."""
        return sum(parts).tanh() @ self.head.to(parts[0].dtype)

    def tokens_of(self, prompt: list[int], count: int) -> list[int]:
        """Returns the most likely continuation, each token from the whole text in float64."""
        text = [*prompt]
        for _ in range(count):
            x, query, key, value, decay = self.inputs(torch.tensor(text), torch.float64)
            padded = torch.cat([x.new_zeros(TAPS - 1, DIM), x])
            mixed = (padded[-TAPS:] * self.taps).sum(0)
            # The recurrence in closed form: each value, decayed by all gates after its token.
            after = decay.flip(0).cumprod(0).flip(0) / decay
            read = torch.einsum("td,td,te,d->e", key, after, value, query[-1])
            attended = (key @ query[-1]).softmax(0) @ value
            text.append(int(self.logits(mixed, read, attended).argmax()))
        return text[len(prompt) :]


class RecurrentExecutor:
    """Computes steps of the model over a paged cache with states."""

    schedules_ahead = False
    eos: frozenset[int] = frozenset()

    def __init__(self, model: Recurrent, *, snapshots: int = 3, every: int = 2, **config: int):
        sizes = {"max_tokens_per_step": 16, "max_seqs": 4, "num_blocks": 60, "context": 120}
        self.config = EngineConfig(**{**sizes, **config}, block_size=BLOCK, prefix_key=b"test")
        self.model = model
        blocks, seqs = self.config.num_blocks, self.config.max_seqs
        layout = TableLayout(blocks, BLOCK, self.config.context // BLOCK, has_states=True)
        limits = StepLimits(self.config.max_tokens_per_step, seqs, layout.width, blocks - 1)
        buckets = layout.ladder(limits, 8).with_cost(sum_of_sizes)
        states = StateSize(seqs, snapshots, every, 4 * DIM * (DIM + TAPS - 1))
        self.sizing = Sizing(
            self.config.context, VOCAB, BLOCK, blocks, layout, buckets, states=states
        )
        shapes = [
            StateShape("conv", (DIM, TAPS - 1), torch.float32),
            StateShape("delta", (DIM, DIM), torch.float32),
        ]
        self.cache = PagedKVCache(
            1, blocks, BLOCK, 1, DIM, states=StateCache([shapes], states.slots)
        )
        for buffer in self.cache.buffers():
            buffer.fill_(torch.nan)
        self._builder = BatchBuilder(blocks, BLOCK)
        self.launches = 0
        self.chunks: list[tuple[int, int]] = []

    def attach(self):
        pass

    def warmup(self, progress=None):
        load()  # the sampler's kernel, which no step may build
        return WarmupReport((), 0.0)

    def check_unchanged(self):
        pass

    def report(self):
        return ExecutorReport("none", "recurrent")

    def copy_states(self, pairs):
        self.cache.states.copy(pairs)

    def plan(self, step, table):
        ids = [sequence.request_id for sequence in step.sequences]
        rows = self._builder.rows(
            table, table.rows(ids), step.starts, step.counts, step.tokens(), logits_needed(step)
        )
        plan = self.sizing.layout.plan(rows)
        try:
            bucket = self.sizing.buckets.pick(**plan.need)
        except BucketOverflow:
            return self.plan(step[:-1], table)
        return PlannedStep(step, plan, bucket, plan.need)

    def launch(self, step):
        self.launches += 1
        self.chunks += zip(step.parts.starts, step.parts.counts, strict=True)
        logits = self.compute(step.plan.fill(step.bucket))
        return sample_step(logits, step.parts, step.plan.rows.logits)

    def compute(self, batch: StateTableBatch) -> Tensor:
        """Computes a step to logits ``[L, VOCAB - 1]``; rows of padding write to block 0 only."""
        x, query, key, value, decay = self.model.inputs(batch.input_ids, torch.float32)
        self.cache.key(0)[batch.slot_mapping] = key[:, None]
        self.cache.value(0)[batch.slot_mapping] = value[:, None]
        out = [torch.zeros_like(x) for _ in range(3)]
        conv, delta = self.cache.states.of_layer(0)
        starts = batch.query_start_loc.tolist()
        for row, length in enumerate(batch.seq_lens.tolist()):
            first, end, slot = starts[row], starts[row + 1], int(batch.state_slots[row])
            if not length:
                continue
            position = length - (end - first)
            past, state = x.new_zeros(DIM, TAPS - 1), x.new_zeros(DIM, DIM)
            if position:
                past, state = conv[slot], delta[slot]
            for at in range(first, end):
                window = torch.cat([past, x[at][:, None]], 1)
                out[0][at] = (window * self.model.taps.float().T).sum(1)
                past = window[:, 1:]
                state = decay[at][:, None] * state + key[at][:, None] * value[at]
                out[1][at] = query[at] @ state
                seen = torch.arange(position + at - first + 1)
                slots = batch.block_tables[row][seen // BLOCK].long() * BLOCK + seen % BLOCK
                scores = self.cache.key(0)[slots, 0] @ query[at]
                out[2][at] = scores.softmax(0) @ self.cache.value(0)[slots, 0]
            conv[slot], delta[slot] = past, state
        return self.model.logits(*(each[batch.logits_index] for each in out))


def recurrent_engine(model: Recurrent | None = None, **config: int) -> Engine:
    """A warm engine of the model."""
    engine = Engine(RecurrentExecutor(model or Recurrent(), **config))
    engine.warmup()
    return engine
