"""Drafts of a second, smaller model, with its own cache, blocks and graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from compiled_attn.engine.block_memory import BlockMemory
from compiled_attn.engine.config import EngineConfig
from compiled_attn.engine.executor import Executor
from compiled_attn.engine.local import LocalExecutor
from compiled_attn.engine.request_state import RequestState, Status
from compiled_attn.engine.sampling import SamplingParams
from compiled_attn.engine.scheduler import ScheduledStep
from compiled_attn.engine.sizing import Sizing
from compiled_attn.engine.speculation.setting import LONGEST
from compiled_attn.engine.speculation.state import DraftState
from compiled_attn.errors import ConfigError
from compiled_attn.models.hf import context_limit
from graphs import BucketEvent

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["DraftModel"]

_SHARE = 0.1


@dataclass(slots=True, eq=False)
class _Twin:
    """A request of the draft model: the tokens of ``target``, of which the first ``known`` are
    accepted, then those of its draft.
    """

    target: RequestState
    own: RequestState
    known: int = 0


class _DraftExecutor(LocalExecutor):
    def _sizing_of(self, model: PreTrainedModel) -> Sizing:
        # The twins of requests hold all of their blocks at once.
        return Sizing.of(model, self.config, self.kernel.layout, most_near=0)


class DraftModel:
    """Samples drafts as the request is sampled, with the same random numbers, so that a model that
    agrees with the large one has its tokens accepted.

    A request is computed when it first gets a draft, a chunk in each step; later only what is new.
    One for which there are no blocks gets no draft.

    Attributes:
        seconds_per_token: of the draft of all requests of a step, measured.
    """

    def __init__(self, executor: LocalExecutor) -> None:
        self.executor = executor
        self.seconds_per_token = 0.0
        self._memory = BlockMemory(executor, executor.config)
        step = executor.sizing.step
        self._room = executor.config.max_seqs if step is None else step.tokens
        self._twins: dict[int, _Twin] = {}

    @staticmethod
    def beside(target: Executor, config: EngineConfig) -> DraftModel:
        """Serves the draft model that an executor has loaded.

        Raises:
            ConfigError: the executor has none, as it is not a `LocalExecutor`.
        """
        if not isinstance(target, LocalExecutor) or (model := target.draft) is None:
            raise ConfigError(
                f"expected a LocalExecutor with speculate {config.speculate!r}, got "
                f"{type(target).__name__}: use ngram:K"
            )
        context = min(context_limit(model) or target.sizing.context, target.sizing.context)
        settings = replace(
            config, speculate=None, sanitize=False, max_adapters=0,
            num_blocks=target.sizing.num_blocks, kv_memory=None, context=context, buckets=None,
            learn_buckets=None, warmup_journal=None, defrag_waste=1.0,
        )  # fmt: skip
        executor = _DraftExecutor(model, settings)
        target.others.append(executor)
        return DraftModel(executor)

    def warmup(self, progress: Callable[[BucketEvent], None] | None = None) -> None:
        """Captures the graphs of the draft model."""
        self.executor.warmup(progress)
        steps = self.executor.report().steps
        runs = [each.run_seconds for each in steps.results if each.run_seconds] if steps else []
        self.seconds_per_token = min(runs, default=0.0)

    def kind(self, sequence: RequestState, state: DraftState) -> int:
        """See `DraftSource.kind`: 1 within the draft model's context."""
        return int(len(sequence.tokens) + LONGEST <= self.executor.sizing.context)

    def drafts(self, lengths: Mapping[RequestState, int]) -> dict[RequestState, list[int]]:
        """See `DraftSource.drafts`."""
        try:
            for twin in [*self._twins.values()]:
                if twin.target.status is not Status.RUNNING:
                    self._free(twin)
            return self._drafts(lengths)
        except BaseException:  # the next drafts begin anew
            self._twins.clear()
            self._memory.reset()
            raise

    def _drafts(self, lengths: Mapping[RequestState, int]) -> dict[RequestState, list[int]]:
        lacking = {}
        for sequence, count in lengths.items():
            twin = self._twin(sequence)
            if self._memory.pool.try_reserve(sequence.request_id, twin.known + count):
                lacking[twin] = count
            else:
                self._free(twin)
        drafted = [*lacking]
        while lacking:
            self._compute([twin.own for twin in lacking])
            # What does not reach its end in one step gets no draft in this one.
            lacking = {
                twin: count - 1
                for twin, count in lacking.items()
                if count > 1 and twin.own.computed == len(twin.own.tokens) - 1
            }
        return {twin.target: twin.own.tokens[twin.known :] for twin in drafted}

    def _twin(self, sequence: RequestState) -> _Twin:
        """Returns the twin of a request, with its tokens and no others."""
        twin, tokens = self._twins.get(sequence.request_id), sequence.tokens
        if twin is None:
            table = self._memory.pool.add(sequence.request_id, tokens, salt=sequence.salt)
            params = sequence.sampling
            sampling = SamplingParams(
                temperature=params.temperature, top_k=params.top_k, top_p=params.top_p,
                min_p=params.min_p, seed=params.seed,
            )  # fmt: skip
            own = RequestState(sequence.request_id, [], sequence.prompt_len, sampling, 0.0)
            own.tokens[:], own.computed = tokens, table.num_cached_tokens
            twin = self._twins[sequence.request_id] = _Twin(sequence, own, len(tokens))
        own, same = twin.own, twin.known
        while same < min(len(own.tokens), len(tokens)) and own.tokens[same] == tokens[same]:
            same += 1
        own.tokens[same:] = tokens[same:]
        own.computed = min(own.computed, same, len(tokens) - 1)
        twin.known = len(tokens)
        self._memory.pool.commit(sequence.request_id, tokens, own.computed)
        return twin

    def _compute(self, sequences: Sequence[RequestState]) -> None:
        """Computes a step, which appends a token to each request that reaches its end."""
        room, counts = self._room, dict[RequestState, int]()
        for sequence in sorted(sequences, key=lambda each: each.remaining):
            if count := min(sequence.remaining, room):
                counts[sequence] = count
                room -= count
        started = time.perf_counter()
        table = self._memory.tables([each.request_id for each in counts])
        step = self.executor.plan(ScheduledStep(counts), table)
        for part, row in zip(step.parts, [*self.executor.launch(step)], strict=True):
            reaches_end = part.needs_logits
            part.sequence.computed = part.start + part.count
            if reaches_end and row.token is not None:
                part.sequence.tokens.append(row.token)
        if sum(counts.values()) <= 2 * len(counts):
            seconds = time.perf_counter() - started
            self.seconds_per_token += _SHARE * (seconds - self.seconds_per_token)

    def _free(self, twin: _Twin) -> None:
        del self._twins[twin.target.request_id]
        self._memory.pool.free(twin.target.request_id)
