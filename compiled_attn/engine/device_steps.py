"""Runs the steps of a model on a device: one copy in, one copy out, no synchronization between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from compiled_attn.engine.executor import PlannedStep
from compiled_attn.engine.logprobs import RowResult
from compiled_attn.engine.request_state import RequestState
from compiled_attn.engine.sampler import rows_of
from compiled_attn.engine.sampling_rows import SamplingRows
from compiled_attn.engine.scheduler import ScheduledStep, ScheduledTokens
from compiled_attn.engine.speculation.verify import accepted, requests_of_rows, sampled
from compiled_attn.engine.staging import Later, Return, Staging, staged_bytes
from compiled_attn.ops.sampling import greedy, sample
from graphs import Bucket, BucketSpace, WarmupManager, explicit
from graphs.backends.eager import EagerBackend
from graphs.backends.recorded import RecordedBackend
from graphs.capture.contract import CaptureSpec

if TYPE_CHECKING:
    from compiled_attn.models.hf import PagedCausalLM

__all__ = ["DeviceSteps", "NextTokens"]


class NextTokens(nn.Module):
    """A model whose graph also returns the most likely tokens, and reads those of the last step.

    Shape (T tokens, L rows of logits):
        - last: ``[most rows]`` int64, the tokens of the last step
        - rows: ``[T]`` int64, for each token its row in ``last``; -1: its id is known
        - forward(last, rows, fields of a batch) -> logits ``[L, vocab]`` and tokens ``[L]`` int64,
          see `ops.sampling.greedy`
    """

    def __init__(self, model: PagedCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, last: Tensor, rows: Tensor, input_ids: Tensor, *inputs: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Computes a step."""
        # A row without a token has failed, but may have been launched ahead once more.
        before = last[rows.clamp_min(0)].clamp_min(0)
        logits = self.model(torch.where(rows < 0, input_ids, before), *inputs)
        return logits, greedy(logits)


class DeviceSteps:
    """Runs the steps of a model on a device that is not the CPU.

    All tensors of a step and its sampling settings cross in one copy. A second graph samples random
    tokens, and runs only if there are any. Only the tokens come back; for a step with a request
    whose logits are changed or reported (penalties, log-probabilities), all logits do, and the host
    samples. The tokens of a step also stay on the device, where the next one finds them.
    """

    def __init__(self, model: PagedCausalLM, buckets: BucketSpace, spec: CaptureSpec) -> None:
        self.module: nn.Module = NextTokens(model)
        self._layout, self._vocab, self._cache = model.layout, model.vocab, model.cache
        self.near_of: Tensor | None = None  # of the host, see `Executor.near_of`
        if model.cache.near is not None:
            self.near_of = model.cache.get_buffer("near_of").cpu()
        self._rows = {bucket: len(self._layout.padding(bucket).logits_index) for bucket in buckets}
        sizes = (staged_bytes(self._batch(bucket)) for bucket in buckets)
        weight = next(model.parameters())
        self._staging = Staging(weight.device, max(sizes))
        most = max(self._rows.values())
        self._return = Return(weight.device, most)
        self._last = weight.new_zeros(most, dtype=torch.int64)
        self._row_before: Mapping[RequestState, int] = {}
        logits = weight.new_zeros(most, self._vocab, dtype=model.logits_dtype)
        self._sampler = WarmupManager(
            sample,
            explicit(["rows"], sorted(set(self._rows.values()))),
            lambda bucket: _sampler_inputs(logits[: bucket["rows"]]),
            backend=_spec_for_sampling(spec),
            name="sampler",
        )
        self.others: Sequence[WarmupManager] = (self._sampler,)
        self.options: Mapping[str, Any] = (
            {"in_place": True} if isinstance(spec.backend, RecordedBackend) else {}
        )

    def padding(self, bucket: Bucket) -> list[Tensor | None]:
        """Returns inputs of padding alone, to capture a bucket with."""
        _, *staged = self._staging.stage(self._batch(bucket))
        return [self._last, *staged[: -len(SamplingRows._fields)]]

    def launch(self, graphs: WarmupManager, step: PlannedStep) -> Sequence[RowResult]:
        """See `Executor.launch`."""
        parts, rows = step.parts, self._rows[step.bucket]
        on_host = not all(parts.sequences[at].sampling.only_samples for at in parts.special)
        is_random = bool(parts.special) and not on_host
        needed = step.plan.rows.logits
        if parts.drafts:
            by_row = dict(zip((np.cumsum(needed) - needed).tolist(), parts, strict=True))
        else:
            by_row = {row: parts[row] for row in parts.special}
        settings = (
            _settings_of(by_row, rows, self._vocab) if is_random else SamplingRows.padding(rows)
        )
        batch = step.plan.fill(step.bucket)
        before = _rows_before(parts, self._row_before, len(batch.input_ids))
        near_of, *staged = self._staging.stage([self.near_of, before, *batch, *settings])
        if near_of is not None:
            self._cache.get_buffer("near_of").copy_(near_of)
        inputs, own = staged[: -len(settings)], staged[-len(settings) :]
        logits, tokens = graphs.run(step.bucket, self._last, *inputs)
        if on_host:
            return Later(lambda: sampled(logits.cpu(), parts, needed))
        if is_random:
            tokens = self._sampler.run(self._sampler.bucket(rows=rows), logits, tokens, *own)
        self._last[:rows].copy_(tokens)
        # Only a step without drafts is followed by one that reads its tokens here.
        self._row_before = {sequence: row for row, sequence in enumerate(parts.sequences)}
        arriving = self._return.send(tokens[: int(needed.sum())])
        if parts.drafts:
            return Later(lambda: accepted(rows_of(arriving), by_row))
        return Later(lambda: rows_of(arriving))

    def _batch(self, bucket: Bucket) -> list[Tensor | None]:
        batch = self._layout.padding(bucket)
        before = _rows_before(ScheduledStep({}), {}, len(batch.input_ids))
        return [self.near_of, before, *batch, *SamplingRows.padding(self._rows[bucket])]


def _spec_for_sampling(spec: CaptureSpec) -> CaptureSpec:
    """Returns how sampling is captured, given how steps are.

    Nearly all of its time is sorting, for which compiled code calls torch too; and inductor of
    torch 2.11 fails on CUDA at the running sum of long rows.
    """
    if isinstance(spec.backend, RecordedBackend):
        return replace(spec, options={**spec.options, "compiler": "eager"})
    is_compiled = spec.backend.name in ("inductor", "aoti")
    return replace(spec, backend=EagerBackend(), options={}) if is_compiled else spec


def _settings_of(parts: Mapping[int, ScheduledTokens], rows: int, vocab: int) -> SamplingRows:
    """Sampling settings of a step that needs only random tokens."""
    at, params, steps, *_ = zip(*requests_of_rows(parts), strict=True)
    return SamplingRows.of([*at], params, steps, rows, vocab)


def _rows_before(step: ScheduledStep, rows: Mapping[RequestState, int], size: int) -> Tensor:
    """For each token of a step, padded to ``size``, the row of the previous step that yields it, or
    -1: ``[T]`` int64."""
    found, at = np.full(size, -1, np.int64), 0
    if step and step.is_ahead:
        for sequence, count, start, _ in step:
            if start == len(sequence.tokens):
                found[at] = rows[sequence]
            at += count
    return torch.from_numpy(found)


def _sampler_inputs(logits: Tensor) -> list[Tensor]:
    settings = SamplingRows.padding(len(logits))
    return [logits, greedy(logits), *(each.to(logits.device) for each in settings)]
