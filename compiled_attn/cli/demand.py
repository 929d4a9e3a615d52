"""The requests of a run: prompts of text, a trace, or a synthetic workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from compiled_attn.cli.errors import UserError
from compiled_attn.cli.inputs import fitted_arrivals, sampling_of
from compiled_attn.cli.options import RunOptions
from compiled_attn.engine import Engine, GenerationResult, SamplingParams
from compiled_attn.engine.sizing import Sizing
from compiled_attn.errors import ConfigError
from compiled_attn.text import Answer, Prompt, Tokenizer
from compiled_attn.text.tokenizer import check_messages
from compiled_attn.workloads import prompts, read_trace, synthetic
from graphs.errors import parse_json, quoted

__all__ = ["Demand", "Texts", "demand_of", "texts_of"]


class Texts(NamedTuple):
    """Prompts of text, and the tokenizer that encodes them."""

    prompts: Sequence[Prompt]
    tokenizer: Tokenizer

    def print_answers(self, results: Sequence[GenerationResult], engine: Engine) -> list[str]:
        """Prints each prompt (the last turn of a chat) and its answer; returns the answers."""
        answers = []
        for result in sorted(results, key=lambda result: result.index):
            prompt, ends = self.prompts[result.index], engine.end_tokens(result.sampling)
            asked = prompt if isinstance(prompt, str) else prompt[-1]["content"]
            answers.append(Answer.of(result, self.tokenizer, ends).text)
            print(f"> {asked}\n{answers[-1]}\n")
        return answers


class Demand(NamedTuple):
    """Token ids of each request, its sampling, and its arrival in seconds (None: at once).

    ``summary`` is a line for the user; None where the user wrote the prompts.
    """

    prompts: Sequence[list[int]]
    sampling: Sequence[SamplingParams]
    arrivals: Sequence[float] | None = None
    summary: str | None = None


def texts_of(options: RunOptions) -> Texts | None:
    """Reads the prompts of the options; None if there are none. Raises errors of bad input."""
    if options.prompts is None and options.prompt is None:
        return None
    given = [f"--{name}" for name in ("prompts", "prompt", "trace", "demand", "scale", "speed")
             if getattr(options, name) is not None]  # fmt: skip
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} were given: choose where requests come from")
    if options.model is None:
        raise UserError(
            f"{given[0]} needs a model that has a tokenizer, got the random one: name it, such as "
            "compiled-attn run smollm2"
        )
    read = [options.prompt] if options.prompts is None else _read_prompts(options.prompts)
    return Texts([each for each in read if each is not None], Tokenizer(options.model))


def demand_of(options: RunOptions, sizing: Sizing, texts: Texts | None) -> Demand:
    """Builds the requests, in lengths that the engine can serve; raises errors of bad input."""
    if texts is not None:
        tokens = [texts.tokenizer.encode(prompt) for prompt in texts.prompts]
        lengths = [options.max_new_tokens] * len(tokens)
        return Demand(tokens, _sampling(options, lengths))
    if options.trace is not None:
        arrivals = read_trace(options.trace, options.requests)
    else:
        arrivals = synthetic(options.demand or "chat", options.requests, options.seed)
    arrivals, summary = fitted_arrivals(options, arrivals, sizing)
    speed = options.speed
    return Demand(
        prompts(arrivals, sizing.vocab, options.seed),
        _sampling(options, [arrival.output_tokens for arrival in arrivals]),
        None if speed is None else [arrival.arrival_s / speed for arrival in arrivals],
        summary,
    )


def _sampling(options: RunOptions, lengths: Sequence[int]) -> list[SamplingParams]:
    params = sampling_of(options)
    return [
        replace(params, max_new_tokens=length, seed=options.seed + index)
        for index, length in enumerate(lengths)
    ]


def _read_prompts(path: Path) -> list[Prompt]:
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                prompts.append(_parse_prompt(line))
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
    if not prompts:
        raise ConfigError(f'{path}: holds no prompt, expected lines such as {{"prompt": "Hello"}}')
    return prompts


def _parse_prompt(line: bytes) -> Prompt:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start + 1}: save it as UTF-8") from error
    row = parse_json(text)
    keys = {"prompt", "messages"} & row.keys() if isinstance(row, dict) else set()
    if len(keys) != 1:
        raise ValueError(
            f"expected a JSON object with a prompt or messages, got {quoted(row)}: such as "
            '{"prompt": "Hello"}'
        )
    if "messages" in keys:
        check_messages(row["messages"])
        return list(row["messages"])
    if not isinstance(prompt := row["prompt"], str):
        raise ValueError(f"expected a prompt of text, got {quoted(prompt)}")
    return prompt
