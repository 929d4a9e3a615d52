"""The prompt and sampling settings of a request: strict checks, no casts."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import InitVar, dataclass, field, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from compiled_attn.engine.config import ConfigError
from compiled_attn.engine.grammar import Grammar
from graphs import BucketOverflow

if TYPE_CHECKING:
    from compiled_attn.engine.sizing import Sizing

__all__ = ["SamplingParams", "check_fits", "check_lengths", "check_settings", "token_ids"]


class _Default(int):
    """A default, to tell it from a value that the user passed."""


_LARGEST = float(np.finfo(np.float32).max)
_PENALTIES = ("presence_penalty", "frequency_penalty")
_REMEDY = "pass token ids, as the model's tokenizer gives them"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is continued.

    Args:
        max_new_tokens: tokens to generate at most (>= 1); ``max_tokens`` is another name for it.
        temperature: 0 takes the most likely token; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens with at least this probability (0 < p <=
            1).
        seed: makes a request reproducible, whatever else is in its batch, and after a preemption.
            None: the engine chooses a seed for each request, which is in its result.
        stop_token_ids: tokens that end the request; they are part of the result.
        ignore_eos: continue after the model's end-of-sequence token.
        stop: strings that end the request, one or several; needs an engine with a tokenizer, see
            `compiled_attn.LLM`. Their tokens are part of the result.
        min_p: keep the tokens that are at least this share as likely as the most likely one, of
            those that top_k and top_p keep; 0 keeps all.
        repetition_penalty: of tokens in the prompt or generated before, logits above 0 are divided
            by it, others multiplied; 1 changes nothing.
        presence_penalty: subtracted from the logits of tokens that were generated before (-2 to 2).
        frequency_penalty: the same, times how often each was generated (-2 to 2).
        logit_bias: numbers added to the logits of tokens, by their ids; stored as pairs.
        min_tokens: no token that ends the request is sampled before so many; stop strings still
            end it.
        logprobs: return log-probabilities of each generated token and of this many most likely
            ones; None: none.
        prompt_logprobs: the same for the tokens of the prompt, which is then not read from the
            prefix cache.
        grammar: constrains the text to a JSON schema, a regular expression or rules; needs an
            engine with a tokenizer. The request ends, without a token for it, where the text can
            only end.
        adapter: name of the LoRA adapter that computes the request, see `Engine.add_adapter`; None:
            the model as it is.
        n: continuations of the prompt, for `Engine.generate` and `Engine.stream`: the first has
            ``seed``, the next ``seed + 1``, and so on.

    Raises:
        ValueError: a value outside its range, or of another type; or both names of one setting.
    """

    max_new_tokens: int = _Default(16)
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    grammar: Grammar | None = None
    adapter: str | None = None
    max_tokens: InitVar[int | None] = field(default=None, kw_only=True)

    def __post_init__(self, max_tokens: int | None) -> None:
        if max_tokens is not None:
            if not isinstance(self.max_new_tokens, _Default):
                raise ValueError(
                    "expected max_new_tokens or max_tokens, which mean the same, got both, "
                    f"{self.max_new_tokens} and {max_tokens}: leave one of them out"
                )
            object.__setattr__(self, "max_new_tokens", max_tokens)
        self._check("max_new_tokens", _integer, lambda n: n >= 1, "an integer >= 1")
        self._check("temperature", _number, lambda t: 0 <= t < math.inf, "a finite number >= 0")
        self._check("top_k", _integer, lambda k: k >= 0, "an integer >= 0")
        self._check("top_p", _number, lambda p: 0 < p <= 1, "a number in (0, 1]")
        if self.seed is not None:
            self._check("seed", _integer, lambda s: 0 <= s < 2**64, "None or in 0..2**64 - 1")
        self._check("stop_token_ids", _integers, lambda _: True, "a tuple of token ids")
        self._check("ignore_eos", _flag, lambda _: True, "True or False")
        self._check("stop", _texts, lambda _: True, "a tuple of texts, none of them empty")
        self._check("min_p", _number, lambda p: 0 <= p <= 1, "a number in [0, 1]")
        self._check(
            "repetition_penalty",
            _number,
            lambda p: 1 / _LARGEST <= p <= _LARGEST,
            "a number > 0, finite in float32",
        )
        for name in _PENALTIES:
            self._check(name, _number, lambda p: -2 <= p <= 2, "a number in [-2, 2]")
        self._check(
            "logit_bias", _biases, lambda _: True, "numbers finite in float32 by token ids >= 0"
        )
        most = self.max_new_tokens
        self._check(
            "min_tokens", _integer, lambda n: 0 <= n <= most, f"an integer in 0..{most}, the most"
        )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._check(name, _integer, lambda n: n >= 0, "None or an integer >= 0")
        self._check("n", _integer, lambda n: n >= 1, "an integer >= 1")
        if self.adapter is not None:
            self._check("adapter", _name, lambda _: True, "None or the name of an adapter")
        if self.grammar is not None:
            self._check(
                "grammar", lambda g: g, lambda g: isinstance(g, Grammar), "None or a Grammar"
            )

    @property
    def penalises(self) -> bool:
        """Whether a penalty applies."""
        return self.repetition_penalty != 1 or any(getattr(self, name) for name in _PENALTIES)

    @property
    def changes_logits(self) -> bool:
        """Whether the model's logits are changed before a token is sampled."""
        return self.penalises or bool(self.logit_bias or self.min_tokens or self.grammar)

    @property
    def only_samples(self) -> bool:
        """Whether only a token of the model's own logits is needed."""
        has_logprobs = self.logprobs is not None or self.prompt_logprobs is not None
        return not (self.changes_logits or has_logprobs)

    @property
    def is_plain(self) -> bool:
        """Whether only the most likely token is needed."""
        return self.only_samples and not self.temperature

    def continuation(self, number: int) -> SamplingParams:
        """Returns the settings of one of ``n`` continuations."""
        seed = None if self.seed is None else (self.seed + number) % 2**64
        return self if self.n == 1 else replace(self, n=1, seed=seed)

    def seeded(self) -> SamplingParams:
        """Returns the same settings with a seed."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(64))

    def _check(
        self, name: str, kind: Callable[[Any], Any], holds: Callable[[Any], bool], expected: str
    ) -> None:
        given = getattr(self, name)
        value = kind(given)
        if value is None or not holds(value):
            text = repr(given)
            text = text if len(text) <= 80 else f"{text[:80]}..."
            raise ValueError(f"expected {name}: {expected}, got {text}")
        object.__setattr__(self, name, value)


def _integer(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    return int(value)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _integers(values: object) -> tuple[int, ...] | None:
    if isinstance(values, (str, bytes, bytearray)) or not isinstance(values, Iterable):
        return None
    numbers = [_integer(value) for value in values]
    return None if None in numbers else tuple(number for number in numbers if number is not None)


def _texts(values: object) -> tuple[str, ...] | None:
    texts = (values,) if isinstance(values, str) else values
    if not isinstance(texts, (tuple, list)):
        return None
    return tuple(texts) if all(isinstance(each, str) and each for each in texts) else None


def _name(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _biases(given: object) -> tuple[tuple[int, float], ...] | None:
    pairs = given.items() if isinstance(given, Mapping) else given
    if not isinstance(pairs, Iterable) or isinstance(pairs, (str, bytes)):
        return None
    biases: dict[int, float] = {}
    for pair in pairs:
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        ids, amount = (_integer(pair[0]), _number(pair[1])) if is_pair else (None, None)
        if ids is None or ids < 0 or amount is None or not abs(amount) <= _LARGEST:
            return None
        biases[ids] = amount
    return tuple(sorted(biases.items()))


def _flag(value: object) -> bool | None:
    return bool(value) if isinstance(value, (bool, np.bool_)) else None


def token_ids(prompt: Any) -> list[int]:
    """Returns the ids of one prompt as Python ints.

    Args:
        prompt: integers of Python or numpy in any ordered collection, a numpy array or a tensor
            ``[n]`` of any integer dtype.

    Raises:
        ConfigError: anything else: text, floats, booleans, another number of axes.
    """
    if isinstance(prompt, (Tensor, np.ndarray)):
        return _of_array(prompt)
    if isinstance(prompt, (str, bytes, bytearray, Mapping, Set)) or not isinstance(
        prompt, Iterable
    ):
        raise ConfigError(
            f"expected a prompt as a list of integers, got {type(prompt).__name__} "
            f"{_short(prompt)}: {_REMEDY}"
        )
    tokens = list(prompt)
    if set(map(type, tokens)) <= {int}:
        return tokens
    return [_of_item(token) for token in tokens]


def check_settings(sampling: Any, salt: Any, arrived_s: Any, *, has_text: bool) -> None:
    """Raises ConfigError if settings have a wrong type, or need a tokenizer."""
    if not isinstance(sampling, SamplingParams):
        raise ConfigError(f"expected SamplingParams, got {type(sampling).__name__}: make one")
    if sampling.stop and not has_text:
        raise ConfigError(
            f"expected no stop strings, as this engine has no tokenizer, got {sampling.stop}: use "
            "compiled_attn.LLM, or give the engine has_stop"
        )
    if sampling.n != 1:
        raise ConfigError(
            f"expected n = 1 for a single request, got {sampling.n}: use generate or stream"
        )
    if not isinstance(salt, (str, bytes, type(None))):
        raise ConfigError(
            f"expected a salt as str, bytes or None, got {type(salt).__name__}: pass its repr"
        )
    try:
        salt.encode() if isinstance(salt, str) else None
    except UnicodeEncodeError as error:
        raise ConfigError(f"expected a salt of text, got {salt!r}: pass bytes") from error
    is_time = isinstance(arrived_s, Real) and math.isfinite(arrived_s)
    if arrived_s is not None and not is_time:
        raise ConfigError(f"expected arrived_s in finite seconds, got {arrived_s!r}")


def check_fits(sizing: Sizing, prompt: Sequence[int], sampling: SamplingParams) -> None:
    """Raises ConfigError if the request can never be served."""
    if not prompt:
        raise ConfigError("expected a prompt of at least one token, got none")
    if min(prompt) < 0 or max(prompt) >= sizing.vocab:
        raise ConfigError(
            f"expected token ids in 0..{sizing.vocab - 1}, got {min(prompt)}..{max(prompt)}: "
            "tokenize with the model's own tokenizer"
        )
    _check_tokens(sizing.vocab, "a logit_bias for", dict(sampling.logit_bias))
    if sampling.min_tokens:
        _check_tokens(sizing.vocab, "min_tokens with stop_token_ids of", sampling.stop_token_ids)
    check_lengths(sizing, len(prompt), sampling.max_new_tokens)


def check_lengths(sizing: Sizing, prompt: int, new: int) -> None:
    """Raises ConfigError if a request of these lengths can never be served."""
    length = prompt + new
    if length > sizing.context:
        raise ConfigError(
            f"expected prompt + max_new_tokens <= context {sizing.context}, got {prompt} + "
            f"{new}: shorten the prompt or max_new_tokens (scale a trace), or raise the context"
        )
    # The last token is never computed, so it needs no slot.
    _check_blocks(sizing, length, sizing.most_blocks(length - 1))


def _check_blocks(sizing: Sizing, length: int, blocks: int) -> None:
    if blocks > sizing.num_blocks - 1:
        raise ConfigError(
            f"expected a pool that holds one request of {length} tokens ({blocks} blocks of "
            f"{sizing.block_size}), got {sizing.num_blocks - 1} blocks: "
            f"raise num_blocks to at least {-(-blocks // sizing.ranks) + 1}"
            + ", or lower max_tokens_per_step"
            * (sizing.window is not None)
        )
    need = sizing.layout.smallest_need(min(blocks, sizing.read_blocks))
    try:
        sizing.buckets.pick(**need)
    except BucketOverflow as error:
        least = [f"{axis} >= {size}" for axis, size in need.items() if size]
        raise ConfigError(
            f"expected a bucket for the last token of a request of {length} tokens, got none: "
            f"add one with {', '.join(least[:-1])} and {least[-1]}"
        ) from error


def _check_tokens(vocab: int, what: str, tokens: Iterable[int]) -> None:
    for token in tokens:
        if not 0 <= token < vocab:
            raise ConfigError(
                f"expected {what} token ids in 0..{vocab - 1}, got {token}: leave it out"
            )


def _of_array(prompt: Tensor | np.ndarray[Any, Any]) -> list[int]:
    if prompt.ndim != 1 or not _is_integer(prompt):
        raise ConfigError(
            f"expected a prompt of integers of shape [n], got {prompt.dtype} of shape "
            f"{list(prompt.shape)}: {_REMEDY}"
        )
    try:
        tokens: list[int] = prompt.tolist()
    except Exception as error:  # a meta or sparse tensor
        raise ConfigError(
            f"expected a prompt with values, got {type(prompt).__name__}: {error}: {_REMEDY}"
        ) from error
    return tokens


def _is_integer(prompt: Tensor | np.ndarray[Any, Any]) -> bool:
    if isinstance(prompt, Tensor):
        return not (prompt.is_floating_point() or prompt.is_complex() or prompt.dtype is torch.bool)
    return prompt.dtype.kind in "iu" and not isinstance(prompt, np.ma.MaskedArray)


def _of_item(token: Any) -> int:
    if not isinstance(token, bool) and isinstance(token, Integral):
        return int(token)
    if isinstance(token, Tensor) and not token.ndim and _is_integer(token):
        return int(token)
    raise ConfigError(
        f"expected a prompt of integers, got {type(token).__name__} {_short(token)} in it: "
        f"{_REMEDY}"
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
