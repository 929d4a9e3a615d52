"""Proof by comparison: generates finished requests again with plain Hugging Face ``generate``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["TIE_TOLERANCE", "CheckReport", "Difference", "Finished", "check"]

TIE_TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 5e-3,
    torch.bfloat16: 4e-2,
}
"""Two tokens tie if their logits differ by at most this share of the row's greatest absolute logit.

Right implementations that add in another order differ by rounding, which is proportional to it.
"""


class Finished(Protocol):
    """A finished greedy request, as the engine yields it: prompt and generated tokens."""

    @property
    def index(self) -> int:
        """Position of the request in its demand."""

    @property
    def prompt(self) -> Sequence[int]:
        """Token ids of the prompt."""

    @property
    def tokens(self) -> Sequence[int]:
        """Generated token ids."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A place where the engine and plain ``generate`` chose different tokens after the same text.

    Both logits are those of plain Hugging Face at this place; ``position`` counts generated tokens.
    """

    request: int
    position: int
    engine_token: int
    plain_token: int
    engine_logit: float
    plain_logit: float

    def __str__(self) -> str:
        return (
            f"request {self.request}, generated token {self.position}: "
            f"engine {self.engine_token} (logit {self.engine_logit:.6g}), "
            f"generate {self.plain_token} (logit {self.plain_logit:.6g})"
        )


@dataclass(slots=True)
class CheckReport:
    """What a check found.

    Args:
        checked_requests, checked_tokens: how much was compared.
        mismatched_tokens: tokens that differ, beginning with the first that no tie explains.
        mismatches: that first difference of each request that has one.
        ties: differences within rounding (:data:`TIE_TOLERANCE`); comparing goes on behind them.
    """

    checked_requests: int = 0
    checked_tokens: int = 0
    mismatched_tokens: int = 0
    mismatches: list[Difference] = field(default_factory=list)
    ties: list[Difference] = field(default_factory=list)


def check(
    model: PreTrainedModel,
    results: Sequence[Finished],
    count: int,
    *,
    on_checked: Callable[[int, int], None] | None = None,
) -> CheckReport:
    """Generate ``count`` of the finished requests again, greedily and one at a time, and compare.

    The model's own weights run through ``model.generate`` with SDPA attention, or eager attention
    where the model needs what SDPA lacks (logit softcap, sinks); the model's attention and
    generation settings are restored afterwards. The requests are spread evenly over ``results``;
    those that generated nothing are left out.

    Args:
        model: the model that the engine served.
        results: finished requests that were decoded greedily.
        count: how many to compare, at most; 0 compares none.
        on_checked: called with (requests done, requests to do) after each.

    Raises:
        ValueError: ``count`` is negative.
    """
    if count < 0:
        raise ValueError(f"count must be at least 0, got {count}")
    chosen = _spread([result for result in results if result.tokens], count)
    report = CheckReport()
    with _plain(model), torch.no_grad():
        for done, result in enumerate(chosen, start=1):
            _compare(model, result, report)
            if on_checked is not None:
                on_checked(done, len(chosen))
    return report


def _spread(results: Sequence[Finished], count: int) -> list[Finished]:
    ordered = sorted(results, key=lambda result: result.index)
    count = min(count, len(ordered))
    return [ordered[place * len(ordered) // count] for place in range(count)]


def _compare(model: PreTrainedModel, result: Finished, report: CheckReport) -> None:
    prompt, tokens = list(result.prompt), list(result.tokens)
    report.checked_requests += 1
    report.checked_tokens += len(tokens)
    done = 0
    while done < len(tokens):
        plain = _generate(model, prompt + tokens[:done], len(tokens) - done)
        different = [i for i, token in enumerate(plain, start=done) if token != tokens[i]]
        if not different:
            return
        first = different[0]
        logits = _next_logits(model, prompt + tokens[:first])
        difference = Difference(
            result.index,
            first,
            tokens[first],
            plain[first - done],
            logits[tokens[first]].item(),
            logits[plain[first - done]].item(),
        )
        if not _is_tie(difference, logits, model.dtype):
            report.mismatches.append(difference)
            report.mismatched_tokens += len(different)
            return
        report.ties.append(difference)
        done = first + 1


def _is_tie(difference: Difference, logits: torch.Tensor, dtype: torch.dtype) -> bool:
    distance = abs(difference.plain_logit - difference.engine_logit)
    return distance <= TIE_TOLERANCE.get(dtype, 0.0) * logits.abs().max().item()


def _generate(model: Any, text: list[int], count: int) -> list[int]:
    ids = torch.tensor([text], device=model.device)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count)
    new: list[int] = output[0, len(text) :].tolist()
    return new


def _next_logits(model: Any, text: list[int]) -> torch.Tensor:
    ids = torch.tensor([text], device=model.device)
    logits: torch.Tensor = model(ids, use_cache=False, logits_to_keep=1).logits[0, -1]
    return logits.double()


@contextlib.contextmanager
def _plain(model: Any) -> Iterator[None]:
    """Run the model as Hugging Face would, greedily and without an end-of-sequence token."""
    from transformers import GenerationConfig

    attention, generation = model.config._attn_implementation, model.generation_config
    model.set_attn_implementation("eager" if _needs_eager(model) else "sdpa")
    model.generation_config = GenerationConfig(do_sample=False)
    try:
        yield
    finally:
        model.generation_config = generation
        model.set_attn_implementation(attention)


def _needs_eager(model: Any) -> bool:
    config = model.config.get_text_config()
    return bool(getattr(config, "attn_logit_softcapping", None)) or not model._supports_sdpa
