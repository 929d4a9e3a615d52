"""The sizes of an engine: context, blocks, tokens of a step, buckets."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from compiled_attn.cache.blocks.window import most_held
from compiled_attn.cache.kv_cache import PagedKVCache
from compiled_attn.engine.cache_size import CacheSize, StateSize, memory_for
from compiled_attn.engine.config import ConfigError, EngineConfig
from compiled_attn.step import ModelWork, PartsLayout, StepLayout, StepLimits, TableLayout
from compiled_attn.step.divided import BlockShare
from graphs import BucketFileError, BucketOverflow, BucketSpace
from graphs.backends import BACKENDS
from graphs.buckets.learned import buckets_for
from graphs.buckets.recorded import RecordedSizes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "LAYOUTS",
    "SEGMENT",
    "LayoutType",
    "Sizing",
    "StepSize",
    "eos_tokens",
    "step_limits",
    "work_of",
]

_log = logging.getLogger(__name__)

SEGMENT = 256
"""Keys of a segment of attention with ``same_bits``."""
_ONE_COMPILE, _COMPILE_EACH = 512, 256
_LEARNED_SHARE = 3  # of max_graphs


@dataclass(frozen=True, slots=True)
class StepSize:
    """The most tokens of a step, and the reason."""

    tokens: int
    why: str

    @staticmethod
    def of(config: EngineConfig, symbolic: Sequence[str]) -> StepSize:
        """Returns the size as configured, or a default.

        Larger steps read the weights less often for a prompt, but delay decodes. The default is 512
        if one compile serves all buckets, so that another bucket is cheap; 256 if each is compiled;
        not more than the buckets hold, and not less than `max_seqs`.

        Args:
            symbolic: axes whose sizes a graph may leave open, see `StepLayout.symbolic`.
        """
        if config.max_tokens_per_step is not None:
            return StepSize(config.max_tokens_per_step, "max_tokens_per_step")
        size = StepSize(_COMPILE_EACH, "a compile for each bucket")
        if _has_one_compile(config, symbolic):
            size = StepSize(_ONE_COMPILE, "one compile for all buckets")
        if config.buckets is not None and (held := _held(config)) < size.tokens:
            size = StepSize(held, "the largest bucket")
        return max(size, StepSize(config.max_seqs, "max_seqs"), key=lambda each: each.tokens)

    def within(self, tokens: int) -> StepSize:
        """Limits the size to what a step can have at all."""
        if self.tokens <= tokens:
            return self
        return StepSize(tokens, "slots of the pool, or tokens of max_seqs contexts")


def _has_one_compile(config: EngineConfig, symbolic: Sequence[str]) -> bool:
    backend = config.backend
    found = BACKENDS.get(backend) if isinstance(backend, str) else backend
    return bool(symbolic) and found is not None and not found.why_no_symbolic()


def _held(config: EngineConfig) -> int:
    return max((bucket.get("tokens", 0) for bucket in config.buckets or ()), default=0)


LayoutType = type[TableLayout] | type[PartsLayout]

LAYOUTS: dict[str, LayoutType] = {"native": TableLayout, "portable": PartsLayout}
"""The layout of steps for each kernel."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """The sizes of an engine.

    Args:
        context: longest prompt plus generation, in tokens.
        vocab: token ids are below this.
        num_blocks: blocks of the cache, null block included, of all ranks.
        layout: how steps become tensors.
        buckets: shapes to capture, with the layout's cost.
        step: the most tokens of a step, and the reason; None: as configured.
        ranks: how many share the cache.
        recorded: counts the needs of steps, with ``learn_buckets``.
        window: tokens that a token sees, itself included, where all layers have a sliding window
            and one rank has the cache: blocks before it are released. None: no block is.
        near_window: the same of the windowed layers, where they have blocks of their own
            (`NearLayers`): the table layout, of a model that also has others. None: none have.
        near_blocks: blocks of these layers, null block included.
        states: slots for recurrent states, where the model has some.
    """

    context: int
    vocab: int
    block_size: int
    num_blocks: int
    layout: StepLayout
    buckets: BucketSpace
    cache: CacheSize | None = None
    step: StepSize | None = None
    ranks: int = 1
    recorded: RecordedSizes | None = None
    window: int | None = None
    near_window: int | None = None
    near_blocks: int | None = None
    states: StateSize | None = None

    @staticmethod
    def of(
        model: PreTrainedModel,
        config: EngineConfig,
        layout: LayoutType = PartsLayout,
        ranks: int = 1,
        draft: PreTrainedModel | None = None,
        *,
        most_near: int | None = None,
    ) -> Sizing:
        """Computes the sizes that the configuration leaves open.

        Args:
            draft: drafts tokens, and has a cache of as many blocks; None: there is none.
            most_near: blocks of windowed layers at most; None: as many as all requests need; 0:
                they have no blocks of their own.

        Raises:
            ConfigError: the sizes do not fit the model or each other.
        """
        context = _context(model, config)
        step = StepSize.of(config, layout.symbolic)
        from compiled_attn.models.hf import cache_for  # loads transformers

        near_blocks = 2 if most_near != 0 and layout is TableLayout and ranks == 1 else None
        slot = cache_for(
            model, 2, 1, dtype=config.cache_dtype, near_blocks=near_blocks,
            latents=not config.same_bits,
        )  # fmt: skip
        states = _states(model, config, slot, step.tokens, layout, ranks)
        cache = CacheSize.of(
            model, config, context, ranks, slot, step.tokens, draft, most_near, states
        )
        num_blocks = BlockShare(0, ranks).of_all(cache.blocks)
        window = slot.window if ranks == 1 else None
        limits = step_limits(config, step.tokens, context, num_blocks, window)
        sizes = num_blocks, config.block_size, -(-context // config.block_size)
        steps = layout(*sizes) if states is None else TableLayout(*sizes, has_states=True)
        if config.same_bits and isinstance(steps, TableLayout):
            steps = replace(steps, segment=SEGMENT)
        buckets = _buckets(config, steps, limits).with_cost(steps.cost(work_of(model)))
        if recorded := _recorded(config, buckets.names):
            buckets = _with_learned(config, buckets, recorded)
        vocab = model.config.get_text_config().vocab_size
        step = step.within(limits.tokens)
        sizing = Sizing(
            context,
            vocab,
            config.block_size,
            num_blocks,
            steps,
            buckets,
            cache,
            step,
            ranks,
            recorded,
            window,
            slot.near.window if slot.near else None,
            cache.near_blocks if slot.near else None,
            states,
        )
        sizing._refuse_steps_beyond_memory(model)
        return sizing

    @property
    def table_width(self) -> int:
        """Blocks of a request of full context."""
        return -(-self.context // self.block_size)

    @property
    def read_blocks(self) -> int:
        """Blocks that one token reads at most."""
        return most_held(self.context, self.window, 1, self.block_size)

    def most_blocks(self, length: int) -> int:
        """Returns the blocks that a request of ``length`` tokens holds at most at a time."""
        step = self.context if self.step is None else self.step.tokens
        return most_held(length, self.window, step, self.block_size)

    def _refuse_steps_beyond_memory(self, model: PreTrainedModel) -> None:
        available = memory_for(model)
        for bucket in self.buckets:
            if available is not None and (needed := self.layout.least_bytes(bucket)) > available:
                raise ConfigError(
                    f"not enough memory: expected steps of at most {available:,} bytes, which this "
                    f"machine has, got {needed:,} bytes at least for {bucket}: lower "
                    "max_tokens_per_step (--max-tokens-per-step), or take smaller buckets"
                )


def _states(
    model: PreTrainedModel,
    config: EngineConfig,
    slot: PagedKVCache,
    step: int,
    layout: LayoutType,
    ranks: int,
) -> StateSize | None:
    name, given = type(model).__name__, ("state_memory", "snapshot_every")
    if slot.states is None:
        if unused := [each for each in given if getattr(config, each) is not None]:
            raise ConfigError(
                f"expected a model with recurrent states for {' and '.join(unused)}, got a {name}, "
                "which has none: leave them out"
            )
        return None
    expected = got = ""
    if config.speculate is not None:
        expected, got = "no speculate, as states cannot be rolled back", repr(config.speculate)
    elif config.backend_name == "onnxrt":
        expected, got = "a backend that captures ops on states", "onnxrt"
    elif ranks > 1:
        expected, got = "one process", f"{ranks} ranks"
    elif model.device.type != "cpu":
        expected, got = "the CPU, which alone has ops on states", str(model.device)
    elif layout is not TableLayout:
        expected, got = "the native kernel", "the portable one"
    if expected:
        raise ConfigError(
            f"a {name} has recurrent states, which need {expected}: got {got}, leave that out"
        )
    return StateSize.of(model, config, slot.states.bytes_per_slot, step)


def step_limits(
    config: EngineConfig, most: int, context: int, num_blocks: int, window: int | None = None
) -> StepLimits:
    """Computes the largest step: each running request writes to a block, each token to a slot."""
    pool = num_blocks - 1
    seqs = min(config.max_seqs, pool)
    tokens = min(most, pool * config.block_size, seqs * context)
    held = most_held(context, window, 1 + config.longest_draft, config.block_size)
    return StepLimits(tokens, seqs, held, pool, config.longest_draft)


def _context(model: PreTrainedModel, config: EngineConfig) -> int:
    from compiled_attn.models.hf import context_limit  # loads transformers

    limit = context_limit(model)
    context = config.context or limit
    if not context:
        raise ConfigError(
            "expected a context, got none in the model's configuration: set context (--context)"
        )
    if limit and context > limit:
        raise ConfigError(f"expected context <= {limit} (the model's), got {context}: lower it")
    return int(context)


def _buckets(config: EngineConfig, layout: StepLayout, limits: StepLimits) -> BucketSpace:
    one_compile = _has_one_compile(config, layout.symbolic)
    space = config.buckets or layout.ladder(limits, config.max_graphs, one_compile=one_compile)
    _check_axes(space, layout)
    if len(space) > config.max_graphs:
        raise ConfigError(
            f"expected at most max_graphs={config.max_graphs} buckets, got {len(space)}: "
            "raise max_graphs"
        )
    largest = layout.largest_need(limits)
    if largest is not None and config.strict:
        _refuse_small(space, largest)
    return space


def _recorded(config: EngineConfig, names: Sequence[str]) -> RecordedSizes | None:
    if config.learn_buckets is None:
        return None
    try:
        return RecordedSizes(config.learn_buckets, names)
    except BucketFileError as error:
        raise ConfigError(str(error)) from error


def _with_learned(
    config: EngineConfig, ladder: BucketSpace, recorded: RecordedSizes
) -> BucketSpace:
    room = max(1, config.max_graphs // _LEARNED_SHARE)
    learned = buckets_for(recorded.counts, ladder, max(len(ladder), config.max_graphs) + room)
    _log.info("%d buckets learned from %s", len(learned) - len(ladder), recorded.path)
    return learned


def _check_axes(space: BucketSpace, layout: StepLayout) -> None:
    given = set(space.names)
    kernels = {frozenset(each.axes): name for name, each in LAYOUTS.items()}
    kernel = kernels[frozenset(layout.axes)]
    if (other := kernels.get(frozenset(given))) is None:
        known = " or ".join(f"{', '.join(each.axes)} ({name})" for name, each in LAYOUTS.items())
        raise ConfigError(
            f"expected buckets over {known}, got {', '.join(space.names)}: name the axes so"
        )
    if other != kernel:
        raise ConfigError(
            f"expected buckets over {', '.join(layout.axes)}, because the kernel is {kernel}, got "
            f"{', '.join(space.names)}: they are for kernel '{other}'"
        )


def _refuse_small(space: BucketSpace, largest: dict[str, int]) -> None:
    try:
        space.pick(**largest)
    except BucketOverflow as error:
        raise ConfigError(
            f"expected a bucket of max_tokens_per_step={largest['tokens']} tokens and "
            f"max_seqs={largest['requests']} requests, got {space.largest} as the largest: add "
            "one, lower these limits, or let steps be cut (--no-strict)"
        ) from error


def work_of(model: PreTrainedModel) -> ModelWork:
    """Computes the work of a token in the model, for the cost of buckets."""
    text = model.config.get_text_config()
    head = text.vocab_size * text.hidden_size
    weights = sum(p.numel() for p in model.parameters()) - head
    return ModelWork(2 * weights, 4 * text.num_hidden_layers * text.hidden_size, 2 * head)


def eos_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Returns the end-of-sequence tokens of the model."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        eos = getattr(model.config, "eos_token_id", None)
    if eos is None:
        return frozenset()
    # Some configurations use -1 for none.
    return frozenset(end for end in ([eos] if isinstance(eos, int) else eos) if end >= 0)
