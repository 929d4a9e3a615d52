"""The steps of a model on a device: one copy in, one copy out, and no waiting between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from compiled_attn.engine.device_draws import NO_TOKEN, DrawRows, drawn_tokens, likely_tokens
from compiled_attn.engine.draws import NOT_FINITE
from compiled_attn.engine.executor import FittedStep
from compiled_attn.engine.logprobs import ScoredToken
from compiled_attn.engine.sampler import sampled
from compiled_attn.engine.staging import Staging, staged_bytes
from compiled_attn.hf import PagedCausalLM
from graphs import Bucket, BucketSpace, WarmupManager, explicit

__all__ = ["DeviceSteps", "NextTokens"]


class NextTokens(nn.Module):
    """A model whose graph also takes the most likely tokens.

    Args:
        model: of the steps.

    Shape:
        - forward(fields of a batch) -> logits ``[L, vocab]`` and tokens ``[L]`` int64, see
          `likely_tokens`
    """

    def __init__(self, model: PagedCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        """Computes a step."""
        logits = self.model(*inputs)
        return logits, likely_tokens(logits)


class DeviceSteps:
    """The steps of a model on a device that is not the CPU.

    All tensors of a step, and how its tokens are drawn, cross in one copy. Tokens that are drawn at
    random are drawn by a second graph, which runs only if there are any. Back come the tokens; or,
    for a step with a request whose logits are changed or told (penalties, log-probabilities), all
    of its logits, and the host samples.

    Args:
        model: what computes them.
        buckets: of the steps.
        strict: a graph of the sampler that cannot be captured is an error.
        backend, options: as of the graphs of the steps.

    Attributes:
        module, options, others: see `compiled_attn.engine.host_steps.Steps`.
    """

    def __init__(
        self,
        model: PagedCausalLM,
        buckets: BucketSpace,
        *,
        strict: bool,
        backend: Any,
        **options: Any,
    ) -> None:
        self.module: nn.Module = NextTokens(model)
        self._form, self._vocab = model.form, model.vocab
        self._rows = {bucket: len(self._form.padding(bucket).logits_index) for bucket in buckets}
        sizes = (staged_bytes(self._batch(bucket)) for bucket in buckets)
        weight = next(model.parameters())
        self._staging = Staging(weight.device, max(sizes))
        logits = weight.new_zeros(max(self._rows.values()), self._vocab, dtype=model.logits_dtype)
        self._draws = WarmupManager(
            drawn_tokens,
            explicit(["rows"], sorted(set(self._rows.values()))),
            lambda bucket: _draw_inputs(logits[: bucket["rows"]]),
            backend=backend,
            strict=strict,
            name="draws",
            **options,
        )
        self.others: Sequence[WarmupManager] = (self._draws,)
        name = backend if isinstance(backend, str) else backend.name
        self.options: Mapping[str, Any] = {"in_place": True} if name == "cudagraph" else {}

    def padding(self, bucket: Bucket) -> list[Tensor | None]:
        """See `Steps`."""
        return self._staging.stage(self._batch(bucket))[: -len(DrawRows._fields)]

    def run(self, graphs: WarmupManager, step: FittedStep) -> list[int | str | ScoredToken]:
        """See `Steps`."""
        rows, special = self._rows[step.bucket], step.parts.special
        on_host = not all(step.parts.sequences[at].sampling.only_draws for at in special)
        is_drawn = bool(special) and not on_host
        draws = DrawRows.of(step.parts, rows, self._vocab) if is_drawn else DrawRows.padding(rows)
        staged = self._staging.stage([*step.plan.fill(step.bucket), *draws])
        inputs, settings = staged[: -len(draws)], staged[-len(draws) :]
        logits, tokens = graphs.run(step.bucket, *inputs)
        if on_host:
            return sampled(logits.cpu(), step.parts, step.plan.rows.logits)
        if is_drawn:
            tokens = self._draws.run(self._draws.bucket(rows=rows), logits, tokens, *settings)
        ids = tokens.tolist()[: len(step.parts)]
        return [NOT_FINITE if token == NO_TOKEN else token for token in ids]

    def _batch(self, bucket: Bucket) -> list[Tensor | None]:
        return [*self._form.padding(bucket), *DrawRows.padding(self._rows[bucket])]


def _draw_inputs(logits: Tensor) -> list[Tensor]:
    settings = DrawRows.padding(len(logits))
    return [logits, likely_tokens(logits), *(each.to(logits.device) for each in settings)]
