"""The steps of a model on a device: one copy in, one copy out, and no waiting between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from compiled_attn.engine.draw_rows import DrawRows
from compiled_attn.engine.executor import FittedStep
from compiled_attn.engine.logprobs import ScoredToken
from compiled_attn.engine.request_state import RequestState
from compiled_attn.engine.sampler import NOT_FINITE, sampled
from compiled_attn.engine.scheduler import ScheduledStep
from compiled_attn.engine.staging import Later, Return, Staging, staged_bytes
from compiled_attn.hf import PagedCausalLM
from compiled_attn.ops.sampling import NO_TOKEN, greedy, sample
from graphs import Bucket, BucketSpace, WarmupManager, explicit
from graphs.backends.eager import EagerBackend
from graphs.capture.contract import CaptureSpec

__all__ = ["DeviceSteps", "NextTokens"]


class NextTokens(nn.Module):
    """A model whose graph also takes the most likely tokens, and reads those of the step before.

    Args:
        model: of the steps.

    Shape (T tokens, L rows of logits):
        - last: ``[most rows]`` int64, the tokens of the step before
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
        # A row without a token is not computed further, but its place may be computed once more.
        before = last[rows.clamp_min(0)].clamp_min(0)
        logits = self.model(torch.where(rows < 0, input_ids, before), *inputs)
        return logits, greedy(logits)


class DeviceSteps:
    """The steps of a model on a device that is not the CPU.

    All tensors of a step, and how its tokens are drawn, cross in one copy. Tokens that are drawn at
    random are drawn by a second graph, which runs only if there are any. Back come the tokens; or,
    for a step with a request whose logits are changed or reported (penalties, log-probabilities),
    all of its logits, and the host samples. The tokens of a step stay on the device too, where the
    next one finds them.

    Args:
        model: what computes them.
        buckets: of the steps.
        spec: how steps are captured; draws are not compiled, see `_spec_of_draws`.

    Attributes:
        module, options, others: see `compiled_attn.engine.local.Steps`.
    """

    def __init__(self, model: PagedCausalLM, buckets: BucketSpace, spec: CaptureSpec) -> None:
        self.module: nn.Module = NextTokens(model)
        self._form, self._vocab = model.form, model.vocab
        self._rows = {bucket: len(self._form.padding(bucket).logits_index) for bucket in buckets}
        sizes = (staged_bytes(self._batch(bucket)) for bucket in buckets)
        weight = next(model.parameters())
        self._staging = Staging(weight.device, max(sizes))
        most = max(self._rows.values())
        self._return = Return(weight.device, most)
        self._last = weight.new_zeros(most, dtype=torch.int64)
        self._row_before: Mapping[RequestState, int] = {}
        logits = weight.new_zeros(most, self._vocab, dtype=model.logits_dtype)
        self._draws = WarmupManager(
            sample,
            explicit(["rows"], sorted(set(self._rows.values()))),
            lambda bucket: _draw_inputs(logits[: bucket["rows"]]),
            backend=_spec_of_draws(spec),
            name="draws",
        )
        self.others: Sequence[WarmupManager] = (self._draws,)
        self.options: Mapping[str, Any] = (
            {"in_place": True} if spec.backend.name == "cudagraph" else {}
        )

    def padding(self, bucket: Bucket) -> list[Tensor | None]:
        """See `Steps`."""
        return [self._last, *self._staging.stage(self._batch(bucket))[: -len(DrawRows._fields)]]

    def run(self, graphs: WarmupManager, step: FittedStep) -> Sequence[int | str | ScoredToken]:
        """See `Steps`."""
        parts, rows = step.parts, self._rows[step.bucket]
        on_host = not all(parts.sequences[at].sampling.only_draws for at in parts.special)
        is_drawn = bool(parts.special) and not on_host
        draws = _draws_of(parts, rows, self._vocab) if is_drawn else DrawRows.padding(rows)
        batch = step.plan.fill(step.bucket)
        before = _rows_before(parts, self._row_before, len(batch.input_ids))
        staged = self._staging.stage([before, *batch, *draws])
        inputs, settings = staged[: -len(draws)], staged[-len(draws) :]
        logits, tokens = graphs.run(step.bucket, self._last, *inputs)
        if on_host:
            return Later(lambda: sampled(logits.cpu(), parts, step.plan.rows.logits))
        if is_drawn:
            tokens = self._draws.run(self._draws.bucket(rows=rows), logits, tokens, *settings)
        self._last[:rows].copy_(tokens)
        self._row_before = {sequence: row for row, sequence in enumerate(parts.sequences)}
        arriving = self._return.send(tokens[: len(parts)])
        return Later(lambda: [NOT_FINITE if each == NO_TOKEN else each for each in arriving])

    def _batch(self, bucket: Bucket) -> list[Tensor | None]:
        batch = self._form.padding(bucket)
        before = _rows_before(ScheduledStep({}), {}, len(batch.input_ids))
        return [before, *batch, *DrawRows.padding(self._rows[bucket])]


def _spec_of_draws(spec: CaptureSpec) -> CaptureSpec:
    """How draws are captured, by how steps are.

    Nearly all of a draw is sorting, for which compiled code calls torch too; and the running sum of
    long rows makes inductor of torch 2.11 fail on CUDA.
    """
    if spec.backend.name == "cudagraph":
        return replace(spec, options={**spec.options, "compiler": "eager"})
    is_compiled = spec.backend.name in ("inductor", "aoti")
    return replace(spec, backend=EagerBackend(), options={}) if is_compiled else spec


def _draws_of(step: ScheduledStep, rows: int, vocab: int) -> DrawRows:
    """How tokens are drawn after a step whose settings do nothing else to the logits."""
    parts = [step[at] for at in step.special]
    params = [part.sequence.sampling for part in parts]
    return DrawRows.of(step.special, params, [part.generated for part in parts], rows, vocab)


def _rows_before(step: ScheduledStep, rows: Mapping[RequestState, int], size: int) -> Tensor:
    """For each token of a step, padded to a size, the row of the step before that gives it, or -1:
    ``[T]`` int64."""
    found, place = np.full(size, -1, np.int64), 0
    if step and step.is_ahead:
        for sequence, count, start in step:
            if start == len(sequence.tokens):
                found[place] = rows[sequence]
            place += count
    return torch.from_numpy(found)


def _draw_inputs(logits: Tensor) -> list[Tensor]:
    settings = DrawRows.padding(len(logits))
    return [logits, greedy(logits), *(each.to(logits.device) for each in settings)]
