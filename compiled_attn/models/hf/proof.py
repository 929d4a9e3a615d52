"""Checks finished requests against plain Hugging Face ``generate``."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from compiled_attn.arguments import whole
from compiled_attn.models.hf.plain_cache import fresh_cache
from compiled_attn.models.hf.rounding import deviation_of, last_logits, rounding_of
from compiled_attn.models.packed import plain_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["TIE_DEVIATIONS", "TIE_TOLERANCE", "CheckReport", "Difference", "check"]

TIE_DEVIATIONS = 4.0
"""Two tokens tie if their logits differ by at most this many standard deviations of the difference.

The deviation is measured for each row, by computing it in a wider dtype (`hf.rounding`). Normally
distributed rounding exceeds 4 deviations once in 30,000 cases, so hardly any correct token is
reported as a mismatch.
"""

TIE_TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 5e-3,
    torch.bfloat16: 4e-2,
}
"""The same relative to the largest absolute logit of the row, if rounding cannot be measured:
for float64, and models that cannot be computed in a wider dtype."""

_HALFWAY = 1 / 8
"""Share of the effect of 8-bit K/V on logits that counts as rounding, at least.

An element halfway between two 8-bit values may be rounded to either, which changes what follows.
That happens to few elements, in some texts: up to 1/20 was seen.
"""


class _Finished(Protocol):
    """A finished greedy request with its index, token ids of the prompt, and those generated."""

    @property
    def index(self) -> int: ...

    @property
    def prompt(self) -> Sequence[int]: ...

    @property
    def tokens(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class Difference:
    """A position where engine and plain ``generate`` chose different tokens after the same text.

    Args:
        request: its index.
        position: counts generated tokens.
        engine_token, plain_token: the tokens chosen.
        engine_logit, plain_logit: logits of both tokens in plain Hugging Face.
        distance: difference of the two in a wider dtype, or in this one if there is none.
        tie_bound: largest difference that rounding explains.
    """

    request: int
    position: int
    engine_token: int
    plain_token: int
    engine_logit: float
    plain_logit: float
    distance: float = 0.0
    tie_bound: float = 0.0

    def __str__(self) -> str:
        apart = f"; {self.distance:.3g} apart, rounding explains {self.tie_bound:.3g}"
        return (
            f"request {self.request}, generated token {self.position}: "
            f"engine {self.engine_token} (logit {self.engine_logit:.6g}), "
            f"generate {self.plain_token} (logit {self.plain_logit:.6g})"
        ) + (apart if self.tie_bound else "")

    @property
    def is_tie(self) -> bool:
        """Whether correct implementations may differ here."""
        return self.distance <= self.tie_bound


@dataclass(slots=True)
class CheckReport:
    """Result of a check.

    Args:
        checked_requests, checked_tokens: number of requests and tokens compared.
        mismatched_tokens: tokens that differ, from the first that is not a tie on.
        mismatches: this first difference of each request that has one.
        ties: differences within rounding (:data:`TIE_DEVIATIONS`), after which comparing goes on.
    """

    checked_requests: int = 0
    checked_tokens: int = 0
    mismatched_tokens: int = 0
    mismatches: list[Difference] = field(default_factory=list)
    ties: list[Difference] = field(default_factory=list)


def check(
    model: PreTrainedModel,
    results: Sequence[_Finished],
    count: int,
    *,
    on_checked: Callable[[int, int], None] | None = None,
    kv_dtype: torch.dtype | None = None,
) -> CheckReport:
    """Generates ``count`` finished requests again, greedily and one at a time, and compares.

    Runs ``model.generate`` with SDPA attention, or eager attention if the model needs what SDPA
    lacks (logit softcap, sinks), and with plain linear layers instead of packed ones; restores all
    of that afterwards.

    Args:
        model: the model of the engine.
        results: greedy requests, from which those to compare are chosen evenly.
        count: maximum number of requests to compare.
        on_checked: called with (requests done, requests to do) after each.
        kv_dtype: int8 or fp8 of an 8-bit cache: plain ``generate`` then rounds its keys and values
            as `compiled_attn.cache.quantisation` does.

    Raises:
        ValueError: ``count`` is negative.
    """
    count = whole("count", count, 0)
    answered = sorted((each for each in results if each.tokens), key=lambda each: each.index)
    count = min(count, len(answered))
    chosen = [answered[number * len(answered) // count] for number in range(count)]
    report = CheckReport()
    with _plain(model), plain_layers(model), torch.no_grad():
        for done, result in enumerate(chosen, start=1):
            _compare(model, result, report, kv_dtype)
            if on_checked is not None:
                on_checked(done, len(chosen))
    return report


def _compare(
    model: Any, result: _Finished, report: CheckReport, kv_dtype: torch.dtype | None
) -> None:
    prompt, tokens = list(result.prompt), list(result.tokens)
    report.checked_requests += 1
    report.checked_tokens += len(tokens)
    done = 0
    while done < len(tokens):
        text, count = prompt + tokens[:done], len(tokens) - done
        ids, cache = torch.tensor([text], device=model.device), fresh_cache(model, kv_dtype)
        mask = torch.ones_like(ids)
        output = model.generate(ids, attention_mask=mask, max_new_tokens=count, **cache)
        plain = output[0, len(text) :].tolist()
        different = [i for i, token in enumerate(plain, start=done) if token != tokens[i]]
        if not different:
            return
        first = different[0]
        text, tokens_here = prompt + tokens[:first], (tokens[first], plain[first - done])
        difference = _difference(model, text, result.index, first, *tokens_here, kv_dtype)
        if not difference.is_tie:
            report.mismatches.append(difference)
            report.mismatched_tokens += len(different)
            return
        report.ties.append(difference)
        done = first + 1


def _difference(
    model: Any,
    text: list[int],
    request: int,
    position: int,
    engine: int,
    plain: int,
    kv_dtype: torch.dtype | None,
) -> Difference:
    both = [engine, plain]
    exact = logits = last_logits(model, text, kv_dtype)
    engine_logit, plain_logit = logits[both].tolist()
    bound = torch.finfo(model.dtype).eps / 2 * (abs(engine_logit) + abs(plain_logit))
    deviations = []
    if (measured := rounding_of(model, text, logits, kv_dtype)) is None:
        bound = TIE_TOLERANCE.get(model.dtype, 0.0) * logits.abs().max().item()
    else:
        exact = measured.exact
        deviations.append(measured.deviation)
    if kv_dtype is not None:
        deviations.append(_HALFWAY * deviation_of(logits, last_logits(model, text)))
    # The deviation of a difference of two logits is larger by the square root of 2.
    bound = max([bound, *(TIE_DEVIATIONS * math.sqrt(2) * each for each in deviations)])
    distance = (exact[engine] - exact[plain]).abs().item()
    return Difference(request, position, engine, plain, engine_logit, plain_logit, distance, bound)


@contextlib.contextmanager
def _plain(model: Any) -> Iterator[None]:
    """Context in which the model runs like plain Hugging Face, greedily, without an EOS token."""
    from transformers import GenerationConfig

    attention, generation = model.config._attn_implementation, model.generation_config
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    model.set_attn_implementation("eager" if capped or not model._supports_sdpa else "sdpa")
    model.generation_config = GenerationConfig(do_sample=False)
    try:
        yield
    finally:
        model.generation_config = generation
        model.set_attn_implementation(attention)
