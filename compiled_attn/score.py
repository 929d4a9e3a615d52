"""Log-probabilities of given tokens, with the bits of an engine with ``same_bits``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compiled_attn.engine.config import EngineConfig
from compiled_attn.engine.local import LocalExecutor
from compiled_attn.engine.logprobs import token_logprobs
from compiled_attn.engine.sampling import token_ids
from compiled_attn.engine.sizing import Sizing
from compiled_attn.errors import ConfigError
from compiled_attn.models.hf import context_limit
from compiled_attn.models.load import unwrap
from compiled_attn.step import BatchBuilder, Request

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Scorer", "score"]

_ROWS = 256  # tokens of a step, which all get logits
_KEPT = ("backend", "block_size", "context", "kv_dtype", "store", "strict", "weights")


class _Executor(LocalExecutor):
    def _sizing_of(self, model: PreTrainedModel) -> Sizing:
        # Windowed layers have no blocks of their own, which a pool would have to lend.
        return Sizing.of(model, self.config, self.kernel.layout, most_near=0)


class Scorer:
    """Computes sequences one at a time with a model, as an engine with ``same_bits`` does.

    The model runs over nothing but the given sequence, from its first token on. Its values may
    change between calls, such as by ``load_state_dict``.

    Args:
        model: a causal LM of transformers that no engine serves; it is changed as by an engine.
        config: that of the engine to compare with; only what decides bits and graphs is read.
            None: the default, with the default store of compiled graphs.

    Raises:
        ConfigError: the model cannot have ``same_bits``, or has no limit of its context.
    """

    def __init__(self, model: Any, config: EngineConfig | None = None) -> None:
        model = unwrap(model)
        given = config or EngineConfig(store=True)
        size = given.block_size
        context = given.context or context_limit(model)
        if context is None:
            raise ConfigError("expected a context to score, got none in the model: set context")
        self._executor = _Executor(
            model,
            EngineConfig(
                same_bits=True,
                max_seqs=_ROWS,
                max_tokens_per_step=_ROWS,
                num_blocks=max(-(-context // size), _ROWS) + 1,
                max_graphs=8,
                **{name: getattr(given, name) for name in _KEPT},
            ),
            timed_runs=0,
        )
        self._executor.warmup()
        self.context = self._executor.sizing.context

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Returns the logits ``[len(tokens), vocab]`` after each token, in the model's dtype.

        Args:
            tokens: integers of Python or numpy, or a tensor ``[n]``.

        Raises:
            ValueError: no tokens, no integers, one that is not in the vocabulary, or more than the
                context.
        """
        executor, sizing, tokens = self._executor, self._executor.sizing, token_ids(tokens)
        _check(tokens, sizing.vocab, sizing.context)
        executor.check_unchanged()
        blocks = range(1, -(-len(tokens) // sizing.block_size) + 1)
        builder = BatchBuilder(sizing.num_blocks, sizing.block_size, sizing.window)
        found = []
        for start in range(0, len(tokens), _ROWS):
            part = tokens[start : start + _ROWS]
            rows = builder.rows_of([Request(part, start, blocks, len(part))])
            plan = sizing.layout.plan(rows)
            bucket = executor.graphs.bucket(**plan.need)
            with torch.no_grad():
                out: Tensor = executor.graphs.run(bucket, *plan.fill(bucket))
            found.append(out[: len(part)].clone())
        return torch.cat(found)

    def score(self, tokens: Sequence[int]) -> Tensor:
        """Returns the log-probability ``[len(tokens) - 1]`` float64 of each token after the first.

        Raises:
            ValueError: see `logits`.
        """
        tokens = token_ids(tokens)
        logits = self.logits(tokens)[:-1]
        return torch.from_numpy(token_logprobs(logits, tokens[1:]))

    def close(self) -> None:
        """Frees the graphs."""
        self._executor.close()


def score(model: Any, tokens: Sequence[int], *, config: EngineConfig | None = None) -> Tensor:
    """Computes the log-probability of each token of a sequence, given those before it.

    It equals, bit for bit, what an engine with ``EngineConfig(same_bits=True)`` returns for a token
    that it generated (``SamplingParams(logprobs=0)``), whatever was computed with it. The `Scorer`
    of the last model is reused.

    Args:
        model, config: see `Scorer`.
        tokens: ids of the whole sequence, see `Scorer.logits`.

    Returns:
        ``[len(tokens) - 1]`` float64.

    Raises:
        ConfigError: see `Scorer`.
        ValueError: see `Scorer.logits`.
    """
    return _scorer(model, config).score(tokens)


_scorer = lru_cache(maxsize=1)(Scorer)


def _check(tokens: Sequence[int], vocab: int, context: int) -> None:
    if not 0 < len(tokens) <= context:
        raise ValueError(f"expected 1..{context} tokens (the context), got {len(tokens)}")
    if not all(0 <= token < vocab for token in tokens):
        raise ValueError(f"expected token ids in 0..{vocab - 1}, got {min(tokens)}..{max(tokens)}")
