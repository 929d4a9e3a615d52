"""The requests of a run: prompts of text, the lengths of a trace, or a drawn demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from compiled_attn.cli.errors import UserError
from compiled_attn.cli.inputs import fitted_arrivals
from compiled_attn.cli.options import RunOptions
from compiled_attn.cli.sampling import sampling_of
from compiled_attn.engine import Engine, GenerationResult, SamplingParams
from compiled_attn.engine.sizing import Sizing
from compiled_attn.text import Answer, Prompt, Tokenizer
from compiled_attn.text.prompts_file import read_prompts
from compiled_attn.workloads import Arrival, prompts, read_trace, synthetic

__all__ = ["Demand", "Texts", "demand_of", "texts_of"]


@dataclass(frozen=True)
class Texts:
    """Prompts of text, and the tokenizer that turns them into ids."""

    prompts: Sequence[Prompt]
    tokenizer: Tokenizer

    def answers(self, results: Sequence[GenerationResult], engine: Engine) -> list[Answer]:
        """The answers among them, in the order of the prompts."""
        ordered = sorted(results, key=lambda result: result.index)
        return [
            Answer.of(result, self.tokenizer, engine.end_tokens(result.sampling))
            for result in ordered
        ]

    def print(self, answers: Sequence[Answer]) -> None:
        """Prints each prompt, of a chat its last turn, and its answer."""
        for answer in answers:
            prompt = self.prompts[answer.result.index]
            asked = prompt if isinstance(prompt, str) else prompt[-1]["content"]
            print(f"> {asked}\n{answer.text}\n")


@dataclass(frozen=True)
class Demand:
    """Token ids of each request, how it is continued, and when it arrives (None: at once).

    ``told``: a line of what they come to, for the user; None where the user wrote the prompts.
    """

    prompts: Sequence[list[int]]
    sampling: Sequence[SamplingParams]
    arrivals: Sequence[float] | None = None
    told: str | None = None


def texts_of(options: RunOptions) -> Texts | None:
    """The prompts that the options name, None if they name none.

    Raises:
        UserError: they come with options for other requests, or without a model that has a
            tokenizer.
        ConfigError, ModelError: the file is bad, or the model has no tokenizer.
    """
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
    read = [options.prompt] if options.prompts is None else read_prompts(options.prompts)
    return Texts([each for each in read if each is not None], Tokenizer(options.model))


def demand_of(options: RunOptions, sizing: Sizing, texts: Texts | None) -> Demand:
    """The requests, in lengths that the engine can serve.

    Raises:
        ConfigError: a prompt without text, or messages that the model has no template for.
        ValueError: the scale that was asked for makes one too long, or the trace is bad.
    """
    if texts is not None:
        tokens = [texts.tokenizer.encode(prompt) for prompt in texts.prompts]
        lengths = [options.max_new_tokens] * len(tokens)
        return Demand(tokens, _sampling(options, lengths))
    arrivals, told = fitted_arrivals(options, _drawn_or_read(options), sizing)
    speed = options.speed
    return Demand(
        prompts(arrivals, sizing.vocab, options.seed),
        _sampling(options, [arrival.output_tokens for arrival in arrivals]),
        None if speed is None else [arrival.arrival_s / speed for arrival in arrivals],
        told,
    )


def _drawn_or_read(options: RunOptions) -> list[Arrival]:
    if options.trace is not None:
        return read_trace(options.trace, options.requests)
    return synthetic(options.demand or "chat", options.requests, options.seed)


def _sampling(options: RunOptions, lengths: Sequence[int]) -> list[SamplingParams]:
    params = sampling_of(options)
    return [
        replace(params, max_new_tokens=length, seed=options.seed + index)
        for index, length in enumerate(lengths)
    ]
