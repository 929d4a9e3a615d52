"""The state of one request on its way through the engine, and its events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, TypeAlias

from compiled_attn.cache.blocks.prefix import Salt
from compiled_attn.engine.constraint import Constraint
from compiled_attn.engine.logit_rules import LogitRules
from compiled_attn.engine.logprobs import RowResult, TokenLogprobs
from compiled_attn.engine.sampling import SamplingParams
from compiled_attn.engine.speculation.state import DraftState

__all__ = ["GenerationResult", "HasStop", "RequestState", "Status", "TokenEvent"]

HasStop: TypeAlias = Callable[[Sequence[int], Sequence[str]], bool]
"""Whether the text of tokens contains one of these strings, which the last token completes. Called
after each token of a request."""


class Status(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A finished request.

    Args:
        index: position among the prompts of its `generate` or `stream`; ``request_id`` of a request
            from `submit`.
        prompt: token ids.
        tokens: generated token ids, a stop token included.
        finish_reason: "stop" (end-of-sequence, stop token or stop string), "length", or "error".
        ttft_s: seconds from arrival to the first token.
        latency_s: seconds from arrival to the end.
        sampling: how it was continued, with the seed that was used.
        request_id: unique in its engine.
        error: for "error" what went wrong; ``tokens`` holds what was generated before.
        choice: which of ``n`` continuations of its prompt it is, from 0 on.
        logprobs: those of ``tokens``, if requested.
        prompt_logprobs: those of the prompt, if requested; the first token has None.
        cached_tokens: tokens of the prompt that were cached when it was first scheduled, and so not
            computed; 0 for further continuations of a prompt, which share all of it.
        queue_s: seconds from arrival until it first had blocks.
        accepted_tokens: how many of ``tokens`` were drafted, see ``speculate``.
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
    accepted_tokens: int = 0


class TokenEvent(NamedTuple):
    """One generated token; ``result`` is set with the last one of its request.

    ``token`` is None in the last event of a request that ended with an error. ``index``,
    ``request_id`` and ``choice`` are those of `GenerationResult`, ``logprobs`` those of the token.
    ``draft`` is the position of the token in its draft, from 1 on; 0: it was not drafted.
    """

    index: int  # type: ignore[assignment]  # not the method of a tuple
    token: int | None
    result: GenerationResult | None = None
    request_id: int = -1
    choice: int = 0
    logprobs: TokenLogprobs | None = None
    draft: int = 0


@dataclass(slots=True, eq=False)
class RequestState:
    """A request's tokens and how far they are computed.

    Args:
        tokens: the prompt followed by the generated tokens.
        prompt_len: tokens of the prompt.
        arrived_s: on the clock of `time.perf_counter`.
        computed: tokens whose keys and values are in the cache; 0 after a preemption.
        reserved: positions that its blocks hold.
        commit_from: number of computed tokens at which the pool next commits a block.
        cached: tokens of the prompt that were cached when it first had blocks; None before.
        stop_tokens: tokens that end it.
        events: the queue that its events go to, under its ``index`` and ``choice``.
        drafting: what the drafter remembers of it.
        accepted: generated tokens that were drafted.
        adapter: slot of its adapter, 0: none.
    """

    request_id: int
    tokens: list[int]
    prompt_len: int
    sampling: SamplingParams
    arrived_s: float
    computed: int = 0
    reserved: int = 0
    commit_from: int = 0
    cached: int | None = None
    begun_s: float | None = None
    status: Status = Status.WAITING
    first_token_s: float | None = None
    stop_tokens: frozenset[int] = field(default_factory=frozenset)
    salt: Salt = None
    index: int = -1
    events: deque[TokenEvent] = field(default_factory=deque)
    has_stop: HasStop | None = None
    constraint: Constraint | None = None
    choice: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    drafting: DraftState | None = None
    accepted: int = 0
    adapter: int = 0
    is_plain: bool = field(init=False)
    rules: LogitRules | None = field(init=False)

    def __post_init__(self) -> None:
        params, rules = self.sampling, None
        if params.changes_logits:
            rules = LogitRules(params, self.prompt_len, self.stop_tokens, self.constraint)
        self.is_plain, self.rules = params.is_plain, rules

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are still to be computed."""
        is_requested = self.sampling.prompt_logprobs is not None
        return is_requested and len(self.prompt_logprobs) < self.prompt_len - 1

    @property
    def remaining(self) -> int:
        """Tokens to compute: 1 for a decode, also of a token that is not known yet."""
        return max(1, len(self.tokens) - self.computed)

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_len

    def wait(self) -> None:
        """Returns to the state in which nothing is computed and no block owned."""
        self.status = Status.WAITING
        self.computed = self.reserved = self.commit_from = 0

    def finish_reason(self, token: int, before: Sequence[int] = ()) -> str:
        """Returns why the request finishes with ``token`` as its next one; "" if it goes on.

        Args:
            before: tokens that precede it, and are not appended yet.
        """
        if token in self.stop_tokens:
            return "stop"
        may_end = self.sampling.stop or self.constraint is not None
        if may_end and self._ends_text([*before, token]):
            return "stop"
        generated = len(self.tokens) - self.prompt_len + len(before)
        is_last = generated + 1 >= self.sampling.max_new_tokens
        return "length" if is_last else ""

    def event(
        self,
        row: RowResult,
        start: int,
        now_s: float,
        reason: str,
        before: Sequence[RowResult] = (),
    ) -> TokenEvent:
        """Returns the event of the next token, or of an error, after those of ``before``."""
        result = self._result(row, start, now_s, reason, before) if reason else None
        return TokenEvent(
            self.index, row.token, result, self.request_id, self.choice, row.logprobs, row.draft
        )

    def apply(
        self, row: RowResult, start: int, length: int, now_s: float, event: TokenEvent | None
    ) -> None:
        """Appends what a step yields; a second call changes nothing."""
        if row.prompt_logprobs:
            end = start + len(row.prompt_logprobs)
            self.prompt_logprobs[start:end] = row.prompt_logprobs
        if event is not None and row.token is not None:
            if row.logprobs is not None:
                self.logprobs[length - self.prompt_len :] = [row.logprobs]
            if self.first_token_s is None:
                self.first_token_s = now_s
            if len(self.tokens) == length:
                self.tokens.append(row.token)
                self.accepted += row.draft > 0

    def _ends_text(self, new: Sequence[int]) -> bool:
        """Whether the last of some new tokens completes a stop string, which `min_tokens` does not
        hold back, or a text that the grammar cannot continue.
        """
        if self.sampling.stop and self.has_stop is not None:
            generated = [*self.tokens[self.prompt_len :], *new]
            if self.has_stop(generated, self.sampling.stop):
                return True
        return self.constraint is not None and self.constraint.is_over([*self.tokens, *new])

    def _result(
        self, row: RowResult, start: int, now_s: float, reason: str, before: Sequence[RowResult]
    ) -> GenerationResult:
        first = now_s if self.first_token_s is None else self.first_token_s
        begun = now_s if self.begun_s is None else self.begun_s
        params, tokens, logprobs = self.sampling, self.tokens[self.prompt_len :], [*self.logprobs]
        for each in (*before, row):
            if each.token is not None:
                tokens.append(each.token)
                if each.logprobs is not None:
                    logprobs.append(each.logprobs)
        end = start + len(row.prompt_logprobs)
        of_prompt = [*self.prompt_logprobs[:start], *row.prompt_logprobs]
        of_prompt += self.prompt_logprobs[end:]
        return GenerationResult(
            index=self.index,
            prompt=self.tokens[: self.prompt_len],
            tokens=tokens,
            finish_reason=reason,
            ttft_s=first - self.arrived_s,
            latency_s=now_s - self.arrived_s,
            sampling=params,
            request_id=self.request_id,
            error=row.error,
            choice=self.choice,
            logprobs=None if params.logprobs is None else logprobs,
            prompt_logprobs=None if params.prompt_logprobs is None else [None, *of_prompt],
            cached_tokens=0 if self.choice else self.cached or 0,
            queue_s=begun - self.arrived_s,
            accepted_tokens=self.accepted + sum(each.draft > 0 for each in (*before, row)),
        )
