"""Requests out of vLLM's log: lengths, times, and which prompts begin alike.

vLLM logs a request's parameters at INFO, and its tokens at DEBUG only. So a server must run with
``--enable-log-requests --enable-log-outputs`` and ``VLLM_LOGGING_LEVEL=DEBUG``, without
``--max-log-len``, which cuts the tokens. Read in vLLM 0.32.0:
``vllm/entrypoints/serve/utils/request_logger.py``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from compiled_attn.errors import TraceError
from compiled_attn.workloads import Arrival

__all__ = ["read_request_log"]

_TIME = re.compile(r"\b(\d\d-\d\d \d\d:\d\d:\d\d)\b")
_ASKED = re.compile(r"\bRequest (\S+) details: .*prompt_token_ids: \[([\d, ]*)\], prompt_embeds")
_TOLD = re.compile(
    r"Generated response (\S+?)( \(streaming \w+\))? details: output_token_ids: \[([\d, ]*)\]"
)
_RECEIVED = "Received request "
_BLOCK = 128
"""Tokens that one prefix id covers."""


@dataclass
class _Seen:
    at: datetime
    prompt: list[int]
    streamed: int = 0
    whole: int = 0

    @property
    def answer(self) -> int:
        """Tokens of the answer: told at once, or else piece by piece."""
        return self.whole or self.streamed


@dataclass
class _Prefixes:
    """Numbers for the beginnings of prompts, in blocks."""

    known: dict[tuple[int, ...], int] = field(default_factory=dict)

    def ids(self, tokens: list[int]) -> tuple[int, ...]:
        """One number for each block: equal ones where everything up to its end is equal."""
        numbers: list[int] = []
        before = -1
        for start in range(0, len(tokens), _BLOCK):
            key = (before, *tokens[start : start + _BLOCK])
            before = self.known.setdefault(key, len(self.known))
            numbers.append(before)
        return tuple(numbers)


def read_request_log(path: Path) -> list[Arrival]:
    """Read the requests of a log, in the order in which they came.

    A request without its answer in the log (it was cut off, or answers were not logged) is left
    out.

    Raises:
        TraceError: the file cannot be read, or holds no request with the tokens of its prompt and
            its answer: the message says how to log them.
    """
    seen: dict[str, _Seen] = {}
    received = 0
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                received += _RECEIVED in line
                _note(seen, line)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    done = [each for each in seen.values() if each.answer and each.prompt]
    if not done:
        raise TraceError(
            f"{path}: expected requests with prompt_token_ids and output_token_ids, got "
            f"{received} without: log with VLLM_LOGGING_LEVEL=DEBUG vllm serve "
            "--enable-log-requests --enable-log-outputs, and without --max-log-len"
        )
    done.sort(key=lambda each: each.at)
    prefixes, first = _Prefixes(), done[0].at
    return [
        Arrival(
            (each.at - first).total_seconds(),
            len(each.prompt),
            each.answer,
            prefixes.ids(each.prompt),
            _BLOCK,
        )
        for each in done
    ]


def _note(seen: dict[str, _Seen], line: str) -> None:
    if asked := _ASKED.search(line):
        seen[asked[1]] = _Seen(_time(line, next(reversed(seen.values()), None)), _numbers(asked[2]))
    elif (told := _TOLD.search(line)) and (request := seen.get(told[1])):
        count = len(_numbers(told[3]))
        if told[2] and "delta" in told[2]:
            request.streamed += count
        else:
            request.whole = count


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]


def _time(line: str, before: _Seen | None) -> datetime:
    """When a line was logged; a log has no years, so December is followed by the next January."""
    last = before.at if before else datetime(2000, 1, 1)
    if (found := _TIME.search(line)) is None:
        return last
    at = datetime.strptime(f"{last.year}-{found[1]}", "%Y-%m-%d %H:%M:%S")
    return at.replace(year=at.year + 1) if last - at > timedelta(days=180) else at
