"""The command ``chat``: a conversation with a model, streamed."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from rich.console import Console

from compiled_attn.cli.errors import FAILED, UserError, bad_input, report_error
from compiled_attn.cli.inputs import (
    dtype_of,
    refuse_unavailable,
    sampling_of,
    tell_conversion,
)
from compiled_attn.cli.options import ChatOptions, settings_of
from compiled_attn.cli.store import stored_backend
from compiled_attn.engine import EngineConfig, SamplingParams
from compiled_attn.errors import ConfigError, RequestFailed
from compiled_attn.text import LLM, Grammars, Message, Tokenizer
from graphs import progress_for

__all__ = ["run_chat"]

_GRAPHS = 6  # one request at a time needs few
_HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C ends an answer"


def run_chat(options: ChatOptions) -> int:
    """Answers a prompt, or every line of the input as a turn; returns the exit code.

    Answers go to stdout, all else to stderr. On a terminal Ctrl-C ends an answer; between answers
    it ends the chat. Raises UserError for bad input, such as a model without a chat template.
    """
    try:
        return _chat(options)
    except RequestFailed as error:
        return report_error(error, FAILED)


def _chat(options: ChatOptions) -> int:
    with bad_input(), stored_backend(options.backend, None) as backend:
        refuse_unavailable(options)
        sampling = sampling_of(options)
        opening = "Hello" if options.prompt is None else options.prompt
        if not opening.strip():
            raise UserError("expected --prompt with text, got an empty one: ask something")
        tell_conversion(options.model)
        tokenizer = Tokenizer(options.model)
        tokenizer.encode(_messages(options, opening))  # fails before the weights do
        if sampling.grammar is not None:
            Grammars(tokenizer).compiled(sampling.grammar)
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        own = {"backend": backend, "max_seqs": 1, "max_graphs": _GRAPHS}
        # The backend has its store already, if one can be used.
        config = EngineConfig(**settings_of(options) | own, watch_process=True, store=False)
        dtype, progress = dtype_of(options), progress_for(sys.stderr)
        llm = LLM(options.model, config, dtype=dtype, device=options.device, progress=progress)
        conversation = Conversation(llm, sampling, _messages(options))
        for turn in _turns(options.prompt):
            name = turn.strip() if options.prompt is None else ""
            if name == "/exit":
                break
            if name == "/help":
                _say(_HELP)
                continue
            if name == "/reset":
                conversation = Conversation(llm, sampling, _messages(options))
                _say("a new conversation")
                continue
            if name.startswith("/") and name[1:].isalpha():
                _say(f"{name} is no command: {_HELP}")
                continue
            try:
                conversation.answer(turn)
            except KeyboardInterrupt:
                if options.prompt is not None or not sys.stdin.isatty():
                    raise
                _say("the answer was cut off; Ctrl-C again, or Ctrl-D, ends the chat")
    return 0


class Conversation:
    """A chat with a model that nothing else uses, turn by turn, after ``messages``."""

    def __init__(self, llm: LLM, sampling: SamplingParams, messages: list[Message]) -> None:
        self._llm, self._sampling, self._messages = llm, sampling, messages

    def answer(self, turn: str) -> None:
        """Prints the answer to a turn as it comes, then a line on stderr with its times."""
        self._messages.append({"role": "user", "content": turn})
        before, started = self._count(), time.perf_counter()
        pieces, first_s, sampling = list[str](), 0.0, self._fitting()
        try:
            for piece in self._llm.stream(self._messages, sampling):
                first_s = first_s or time.perf_counter() - started
                pieces.append(piece)
                print(piece, end="", flush=True)
        finally:  # an interrupted answer stays in the conversation
            print()
            self._messages.append({"role": "assistant", "content": "".join(pieces)})
        seconds, most = time.perf_counter() - started, sampling.max_new_tokens
        tokens, asked, found = (b - a for a, b in zip(before, self._count(), strict=True))
        self._report(tokens, asked, found, first_s, seconds, most)

    def _fitting(self) -> SamplingParams:
        context = self._llm.engine.sizing.context
        prompt = len(self._llm.tokenizer.encode(self._messages))
        if prompt >= context:
            raise ConfigError(
                f"expected a conversation shorter than the context of {context} tokens, got "
                f"{prompt}: begin a new one, or give a larger --context"
            )
        most = min(self._sampling.max_new_tokens, context - prompt)
        return replace(self._sampling, max_new_tokens=most)

    def _count(self) -> tuple[int, int, int]:
        """Tokens that were generated, looked up in the cache, and found there."""
        engine = self._llm.engine
        stats = engine.memory.stats()
        return engine.tally.count("generated_tokens"), stats.queried_tokens, stats.hit_tokens

    def _report(
        self, tokens: int, asked: int, found: int, first_s: float, seconds: float, most: int
    ) -> None:
        cut = "cut at " if tokens == most else ""
        _say(
            f"{cut}{tokens} tokens in {seconds:.1f} s, the first after {first_s:.2f} s; "
            f"{found / asked:.0%} of {asked} prompt tokens were cached"
        )


def _say(text: str) -> None:
    Console(stderr=True).print(text, style="dim", highlight=False, soft_wrap=True)


def _messages(options: ChatOptions, *turns: str) -> list[Message]:
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return [*system, *({"role": "user", "content": turn} for turn in turns)]


def _turns(prompt: str | None) -> Iterator[str]:
    if prompt is not None:
        yield prompt
        return
    if sys.stdin.isatty():
        _say("a line is a turn; /help lists commands, /exit or Ctrl-D ends")
    while (line := _line()) is not None:
        if line.strip():
            yield line


def _line() -> str | None:
    try:
        return Console().input("[bold]> [/]") if sys.stdin.isatty() else input()
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise UserError("expected input in UTF-8, got other bytes: convert it first") from error
