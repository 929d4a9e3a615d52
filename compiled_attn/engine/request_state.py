"""The state of one request on its way through the engine, and the mailbox of its events."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from compiled_attn.cache.blocks.prefix import Salt
from compiled_attn.engine.constraint import Constraint
from compiled_attn.engine.logit_rules import LogitRules
from compiled_attn.engine.logprobs import ScoredToken, TokenLogprobs
from compiled_attn.engine.sampling import SamplingParams

__all__ = ["GenerationResult", "HasStop", "Mailbox", "RequestState", "Status", "TokenEvent"]

Event = TypeVar("Event")

HasStop: TypeAlias = Callable[[Sequence[int], Sequence[str]], bool]
"""Whether the text of tokens has one of these strings, which the last token ends: asked after each
token of a request. It changes nothing."""


class Mailbox(Generic[Event]):
    """Events that wait for one reader, each under a key.

    An event that is put again under its key is the same event. What was handed out is kept until
    the reader says that it arrived, so that an interrupt on the way back to the caller loses
    nothing.
    """

    def __init__(self) -> None:
        self._events: dict[Hashable, Event] = {}
        self._handed_out: tuple[Hashable, ...] = ()

    def put(self, events: Mapping[Hashable, Event]) -> None:
        """Adds events under their keys; those that are here already stay where they are."""
        self._events.update(events)

    def hand_out(self) -> list[Event]:
        """All events, oldest first; they stay until `arrived`."""
        self._handed_out = tuple(self._events)
        return list(self._events.values())

    def hand_out_first(self) -> Event:
        """The oldest event, of which there is one; it stays until `arrived`."""
        key, event = next(iter(self._events.items()))
        self._handed_out = (key,)
        return event

    def arrived(self) -> None:
        """What was handed out last is with the reader; once more changes nothing."""
        for key in self._handed_out:
            self._events.pop(key, None)
        self._handed_out = ()

    def came_back(self) -> None:
        """What was handed out last did not reach the reader, and is handed out again."""
        self._handed_out = ()

    def __len__(self) -> int:
        """How many events the reader has not got yet."""
        return len(self._events) - sum(key in self._events for key in self._handed_out)


class Status(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A finished request.

    Args:
        index: its position among the prompts of its `generate` or `stream`; of a request that was
            submitted by hand, its ``request_id``.
        prompt: token ids.
        tokens: what was generated, a stop token included.
        finish_reason: "stop" (end-of-sequence, stop token or stop string), "length", or "error".
        ttft_s: seconds from its arrival to its first token.
        latency_s: seconds from its arrival to its end.
        sampling: how it was continued, with the seed that it had.
        request_id: its own, never given twice by one engine.
        error: for "error" what went wrong; ``tokens`` holds what was generated before.
        choice: which of ``n`` continuations of its prompt it is, from 0 on.
        logprobs: of ``tokens``, where its sampling asks for them.
        prompt_logprobs: of the prompt, whose first token has none.
        cached_tokens: how many tokens of the prompt were cached when it was first begun, and so not
            computed; 0 for further continuations of a prompt, which share all of it.
        queue_s: seconds from its arrival until it first had blocks.
    """

    index: int
    prompt: list[int]
    tokens: list[int]
    finish_reason: str
    ttft_s: float
    latency_s: float
    sampling: SamplingParams
    request_id: int
    error: str = ""
    choice: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int = 0
    queue_s: float = 0.0


class TokenEvent(NamedTuple):
    """One generated token; ``result`` is set with the last one of its request.

    ``token`` is None in the last event of a request that ended with an error. ``index``,
    ``request_id`` and ``choice`` are those of `GenerationResult`, ``logprobs`` those of the token.
    """

    index: int  # type: ignore[assignment]  # not the method of a tuple
    token: int | None
    result: GenerationResult | None = None
    request_id: int = -1
    choice: int = 0
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True, eq=False)
class RequestState:
    """A request's tokens and how far they are computed.

    ``tokens`` is the prompt followed by what was generated; ``computed`` of them have keys and
    values in the cache. A preempted sequence goes back to ``computed = 0`` and keeps its tokens. It
    has blocks for ``reserved`` positions, and nothing to report to its pool as long as fewer than
    ``quiet_below`` are computed. Its events go to ``mailbox``, under ``index`` and ``choice``.
    ``cached`` is None until it has blocks for the first time: then it found so many tokens cached.
    """

    request_id: int
    tokens: list[int]
    prompt_len: int
    sampling: SamplingParams
    arrived_s: float
    computed: int = 0
    reserved: int = 0
    quiet_below: int = 0
    cached: int | None = None
    begun_s: float | None = None
    status: Status = Status.WAITING
    first_token_s: float | None = None
    stop_tokens: frozenset[int] = field(default_factory=frozenset)
    salt: Salt = None
    index: int = -1
    mailbox: Mailbox[TokenEvent] = field(default_factory=Mailbox)
    has_stop: HasStop | None = None
    constraint: Constraint | None = None
    choice: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    is_plain: bool = field(init=False)
    rules: LogitRules | None = field(init=False)

    def __post_init__(self) -> None:
        params, rules = self.sampling, None
        if params.changes_logits:
            rules = LogitRules(params, self.prompt_len, self.stop_tokens, self.constraint)
        self.is_plain, self.rules = params.is_plain, rules

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are wanted and not all there."""
        is_wanted = self.sampling.prompt_logprobs is not None
        return is_wanted and len(self.prompt_logprobs) < self.prompt_len - 1

    @property
    def remaining(self) -> int:
        """Tokens that are to be computed: 1 for a decode, also of a token still on its way."""
        return max(1, len(self.tokens) - self.computed)

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_len

    def wait(self) -> None:
        """Goes back to where nothing is computed, and no block held."""
        self.status = Status.WAITING
        self.computed = self.reserved = self.quiet_below = 0

    def event(
        self, token: int, now_s: float, scored: ScoredToken | None = None, start: int = 0
    ) -> TokenEvent:
        """What is told once ``token`` is the next one; changes nothing.

        Args:
            token: its id.
            now_s: the time.
            scored: its log-probabilities, where the request wants any.
            start: how many tokens were computed before the step that gave it.
        """
        is_last = len(self.tokens) + 1 >= self.prompt_len + self.sampling.max_new_tokens
        own = None if scored is None else scored.logprobs
        stops = token in self.stop_tokens or self._ends_text(token)
        if not (is_last or stops):
            return TokenEvent(self.index, token, None, self.request_id, self.choice, own)
        reason = "stop" if stops else "length"
        result = self._result(
            [*self.tokens[self.prompt_len :], token], reason, now_s, "", scored, start
        )
        return TokenEvent(self.index, token, result, self.request_id, self.choice, own)

    def failure(self, error: str, now_s: float) -> TokenEvent:
        """What is told when the request ends with an error; changes nothing."""
        result = self._result(self.tokens[self.prompt_len :], "error", now_s, error)
        return TokenEvent(self.index, None, result, self.request_id, self.choice)

    def take(self, place: int, token: int, now_s: float) -> None:
        """Makes ``token`` the one at ``place``, the next; once more changes nothing."""
        if len(self.tokens) == place:
            self.tokens.append(token)
        if self.first_token_s is None:
            self.first_token_s = now_s

    def take_scores(self, computed: int, place: int, scored: ScoredToken) -> None:
        """Keeps the log-probabilities of a step; once more changes nothing.

        Args:
            computed: tokens that were, before the step.
            place: of the token that the step gave.
            scored: that token and what was told with it.
        """
        self.prompt_logprobs[computed : computed + len(scored.prompt)] = scored.prompt
        if scored.logprobs is not None:
            self.logprobs[place - self.prompt_len :] = [scored.logprobs]

    def _ends_text(self, token: int) -> bool:
        """Whether a token ends a stop string, which `min_tokens` does not hold back, or a text that
        the grammar cannot go on with.
        """
        if self.sampling.stop and self.has_stop is not None:
            generated = [*self.tokens[self.prompt_len :], token]
            if self.has_stop(generated, self.sampling.stop):
                return True
        return self.constraint is not None and self.constraint.is_over([*self.tokens, token])

    def _result(
        self,
        generated: list[int],
        reason: str,
        now_s: float,
        error: str = "",
        scored: ScoredToken | None = None,
        start: int = 0,
    ) -> GenerationResult:
        first = now_s if self.first_token_s is None else self.first_token_s
        last = [scored.logprobs] if scored and scored.logprobs else []
        prompt = self.prompt_logprobs
        if scored and scored.prompt:
            prompt = [*prompt[:start], *scored.prompt]
        wants = self.sampling
        return GenerationResult(
            self.index,
            self.tokens[: self.prompt_len],
            generated,
            reason,
            first - self.arrived_s,
            now_s - self.arrived_s,
            self.sampling,
            self.request_id,
            error,
            self.choice,
            None if wants.logprobs is None else [*self.logprobs, *last],
            None if wants.prompt_logprobs is None else [None, *prompt],
            0 if self.choice else self.cached or 0,
            (now_s if self.begun_s is None else self.begun_s) - self.arrived_s,
        )
