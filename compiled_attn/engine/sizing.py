"""What a model and a configuration come to: context, blocks, buckets; and which requests fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from compiled_attn.engine.config import ConfigError, EngineConfig
from compiled_attn.engine.ladder import (
    AXES,
    TABLE_AXES,
    StepLimits,
    default_buckets,
    step_cost,
    table_buckets,
    table_cost,
)
from compiled_attn.engine.sampling import SamplingParams
from compiled_attn.hf import cache_for, context_limit
from graphs import Bucket, BucketOverflow, BucketSpace
from graphs.capture.memory import machine_bytes

__all__ = ["Sizing", "cost_of_steps", "eos_tokens", "step_limits"]

_DEFAULT_KV_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Sizing:
    """The sizes of an engine, settled.

    Args:
        context: longest prompt plus generation, in tokens.
        vocab: token ids are below this.
        block_size: slots in a block.
        num_blocks: blocks of the cache, null block included.
        buckets: shapes to capture, priced by `step_cost` or `table_cost`.
        is_native: whether they are for the native kernel.
    """

    context: int
    vocab: int
    block_size: int
    num_blocks: int
    buckets: BucketSpace
    is_native: bool = False

    @staticmethod
    def of(model: PreTrainedModel, config: EngineConfig, is_native: bool = False) -> Sizing:
        """Fills in what the configuration leaves open.

        Raises:
            ConfigError: the sizes do not fit the model or each other.
        """
        context = _context(model, config)
        num_blocks = config.num_blocks or _affordable_blocks(model, config, context)
        _refuse_cache_beyond_memory(model, config, num_blocks)
        limits = step_limits(config, context, num_blocks)
        vocab = model.config.get_text_config().vocab_size
        buckets = _buckets(model, config, limits, is_native)
        sizing = Sizing(context, vocab, config.block_size, num_blocks, buckets, is_native)
        sizing._refuse_steps_beyond_memory(model)
        return sizing

    @property
    def table_width(self) -> int:
        """Blocks of a request of full context."""
        return -(-self.context // self.block_size)

    def check(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        """Raises ConfigError if the request can never be served, whatever else runs."""
        if not prompt:
            raise ConfigError("expected a prompt of at least one token, got none")
        if min(prompt) < 0 or max(prompt) >= self.vocab:
            raise ConfigError(
                f"expected token ids in 0..{self.vocab - 1}, got {min(prompt)}..{max(prompt)}: "
                "tokenize with the model's own tokenizer"
            )
        self.check_lengths(len(prompt), sampling.max_new_tokens)

    def check_lengths(self, prompt: int, new: int) -> None:
        """Raises ConfigError if a request of these lengths can never be served."""
        length = prompt + new
        if length > self.context:
            raise ConfigError(
                f"expected prompt + max_new_tokens <= context {self.context}, got {prompt} + "
                f"{new}: shorten the prompt or scale the lengths"
            )
        # The last token is never computed, so it needs no slot.
        self._check_blocks(length, -(-(length - 1) // self.block_size))

    def _refuse_steps_beyond_memory(self, model: PreTrainedModel) -> None:
        there = _memory_for(model)
        for bucket in self.buckets:
            if there is not None and (wanted := self._least_bytes(bucket)) > there:
                raise ConfigError(
                    f"not enough memory: expected steps of at most {there:,} bytes, which this "
                    f"machine has, got {wanted:,} bytes at least for {bucket}: lower "
                    "max_tokens_per_step (--max-tokens-per-step), or take smaller buckets"
                )

    def _least_bytes(self, bucket: Bucket) -> int:
        """Of the inputs of a step, and of what a portable one adds to the scores of its tokens.

        That is 4 bytes for each pair of tokens, beside one that says whether it counts.
        """
        tokens = bucket.tokens
        if self.is_native:
            return 24 * tokens + 4 * bucket.requests * self.table_width
        return 24 * tokens + 5 * tokens**2 + 4 * tokens * bucket.shared + 40 * bucket.unique

    def _check_blocks(self, length: int, blocks: int) -> None:
        if blocks > self.num_blocks - 1:
            raise ConfigError(
                f"expected a pool that holds one request of {length} tokens ({blocks} blocks of "
                f"{self.block_size}), got {self.num_blocks - 1} blocks: "
                f"raise num_blocks to at least {blocks + 1}"
            )
        parts = {"requests": 1} if self.is_native else {"shared": 0, "unique": blocks, "logits": 1}
        least = "requests >= 1" if self.is_native else f"unique >= {blocks} and logits >= 1"
        try:
            self.buckets.pick(tokens=1, **parts)
        except BucketOverflow as error:
            raise ConfigError(
                f"expected a bucket for the last token of a request of {length} tokens, got none: "
                f"add one with tokens >= 1 and {least}"
            ) from error


def step_limits(config: EngineConfig, context: int, num_blocks: int) -> StepLimits:
    """The largest step: each request that runs writes to a block, and each token to a slot."""
    pool = num_blocks - 1
    seqs = min(config.max_seqs, pool)
    tokens = min(config.max_tokens_per_step, pool * config.block_size, seqs * context)
    return StepLimits(tokens, seqs, -(-context // config.block_size), pool)


def _context(model: PreTrainedModel, config: EngineConfig) -> int:
    limit = context_limit(model)
    context = config.context or limit
    if not context:
        raise ConfigError("expected a context, the model's configuration has none: set context")
    if limit and context > limit:
        raise ConfigError(f"expected context <= {limit} (the model's), got {context}")
    return int(context)


def _affordable_blocks(model: PreTrainedModel, config: EngineConfig, context: int) -> int:
    one_request = -(-context // config.block_size)
    affordable = _DEFAULT_KV_BYTES // _bytes_per_block(model, config)
    return 1 + min(config.max_seqs * one_request, max(one_request, affordable))


def _bytes_per_block(model: PreTrainedModel, config: EngineConfig) -> int:
    return cache_for(model, 2, 1).bytes_per_block * config.block_size


def _refuse_cache_beyond_memory(
    model: PreTrainedModel, config: EngineConfig, num_blocks: int
) -> None:
    """Before anything is allocated: the system would promise more memory than there is."""
    there, wanted = _memory_for(model), num_blocks * _bytes_per_block(model, config)
    if there is not None and wanted > there:
        raise ConfigError(
            f"not enough memory: expected a KV cache of at most {there:,} bytes, which this "
            f"machine has, got {wanted:,} bytes for {num_blocks} blocks of {config.block_size} "
            "tokens: lower num_blocks (--num-blocks), block_size or the context"
        )


def _memory_for(model: PreTrainedModel) -> int | None:
    """Bytes of the memory that the model is in, None where nobody says."""
    return machine_bytes() if next(model.parameters()).device.type == "cpu" else None


def _buckets(
    model: PreTrainedModel, config: EngineConfig, limits: StepLimits, is_native: bool
) -> BucketSpace:
    ladder, axes = (table_buckets, TABLE_AXES) if is_native else (default_buckets, AXES)
    space = config.buckets or ladder(limits, config.max_graphs)
    _check_axes(space, axes, is_native)
    if len(space) > config.max_graphs:
        raise ConfigError(
            f"expected at most max_graphs={config.max_graphs} buckets, got {len(space)}: "
            "raise max_graphs"
        )
    if is_native and config.strict:
        _refuse_small(space, limits)
    return space.with_cost(cost_of_steps(model, config.block_size, is_native))


def _check_axes(space: BucketSpace, axes: Sequence[str], is_native: bool) -> None:
    given = set(space.names)
    if given not in (set(AXES), set(TABLE_AXES)):
        raise ConfigError(
            f"expected buckets over {', '.join(TABLE_AXES)} (native) or {', '.join(AXES)} "
            f"(portable), got {', '.join(space.names)}: name the axes so"
        )
    if given != set(axes):
        kernel, other = ("native", "portable") if is_native else ("portable", "native")
        raise ConfigError(
            f"expected buckets over {', '.join(axes)}, because the kernel is {kernel}, got "
            f"{', '.join(space.names)}: they are for kernel '{other}'"
        )


def _refuse_small(space: BucketSpace, limits: StepLimits) -> None:
    """Two axes hold every step with one bucket more, so a file without it is a mistake."""
    try:
        space.pick(tokens=limits.tokens, requests=limits.seqs)
    except BucketOverflow as error:
        raise ConfigError(
            f"expected a bucket of max_tokens_per_step={limits.tokens} tokens and "
            f"max_seqs={limits.seqs} requests, got {space.largest} as the largest: add one, lower "
            "these limits, or let steps be cut (--no-strict)"
        ) from error


def cost_of_steps(
    model: PreTrainedModel, block_size: int, is_native: bool = False
) -> Callable[[Mapping[str, int]], float]:
    """The `step_cost` of a model, by which the engine picks its buckets; native: `table_cost`."""
    text = model.config.get_text_config()
    head = text.vocab_size * text.hidden_size
    weights = sum(p.numel() for p in model.parameters()) - head
    if is_native:
        return table_cost(2 * weights, 2 * head)
    return step_cost(2 * weights, 4 * text.num_hidden_layers * text.hidden_size, block_size)


def eos_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Tokens that end a text of the model."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        eos = getattr(model.config, "eos_token_id", None)
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)
