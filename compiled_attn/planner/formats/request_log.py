"""Reads requests from vLLM's log: lengths, times, and common prefixes.

vLLM logs tokens at DEBUG only: the server must run with ``--enable-log-requests
--enable-log-outputs`` and ``VLLM_LOGGING_LEVEL=DEBUG``, without ``--max-log-len``, which truncates
them. As in vLLM 0.32.0: ``vllm/entrypoints/serve/utils/request_logger.py``.
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
_REQUEST = re.compile(r"\bRequest (\S+) details: .*prompt_token_ids: \[([\d, ]*)\], prompt_embeds")
_RESPONSE = re.compile(
    r"Generated response (\S+?)( \(streaming \w+\))? details: output_token_ids: \[([\d, ]*)\]"
)
_RECEIVED = "Received request "
_BLOCK = 128  # tokens per prefix id


@dataclass
class _Logged:
    at: datetime
    prompt: list[int]
    streamed: int = 0
    whole: int = 0

    @property
    def output(self) -> int:
        """Number of generated tokens, logged at once or streamed."""
        return self.whole or self.streamed


@dataclass
class _Prefixes:
    """Ids of the prefixes of prompts, in blocks."""

    known: dict[tuple[int, ...], int] = field(default_factory=dict)

    def ids(self, tokens: list[int]) -> tuple[int, ...]:
        """Return an id per block: equal ids where everything up to its end is equal."""
        numbers: list[int] = []
        before = -1
        for start in range(0, len(tokens), _BLOCK):
            key = (before, *tokens[start : start + _BLOCK])
            before = self.known.setdefault(key, len(self.known))
            numbers.append(before)
        return tuple(numbers)


def read_request_log(path: Path) -> list[Arrival]:
    """Read the requests of a log, in order of arrival, without those whose output is missing.

    Raises:
        TraceError: the file cannot be read, or has no request with the tokens of its prompt and its
            output.
    """
    found: dict[str, _Logged] = {}
    received = 0
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                received += _RECEIVED in line
                _read_line(found, line)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    done = [each for each in found.values() if each.output and each.prompt]
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
            each.output,
            prefixes.ids(each.prompt),
            _BLOCK,
        )
        for each in done
    ]


def _read_line(found: dict[str, _Logged], line: str) -> None:
    if match := _REQUEST.search(line):
        found[match[1]] = _Logged(
            _time(line, next(reversed(found.values()), None)), _numbers(match[2])
        )
    elif (match := _RESPONSE.search(line)) and (request := found.get(match[1])):
        count = len(_numbers(match[3]))
        if match[2] and "delta" in match[2]:
            request.streamed += count
        else:
            request.whole = count


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]


def _time(line: str, before: _Logged | None) -> datetime:
    """The time of a line; a log has no years, so January after December is in the next year."""
    last = before.at if before else datetime(2000, 1, 1)
    if (found := _TIME.search(line)) is None:
        return last
    at = datetime.strptime(f"{last.year}-{found[1]}", "%Y-%m-%d %H:%M:%S")
    return at.replace(year=at.year + 1) if last - at > timedelta(days=180) else at
