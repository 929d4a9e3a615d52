"""Answers after the text of their prompt."""

from __future__ import annotations

import pytest

from compiled_attn.engine import GenerationResult, SamplingParams
from compiled_attn.text import Tokenizer
from compiled_attn.text.answer import echo_of


def echo(
    tokenizer: Tokenizer, prompt: list[int], tokens: list[int], stop: tuple[str, ...] = ()
) -> str:
    sampling = SamplingParams(stop=stop)
    result = GenerationResult(0, prompt, tokens, "stop", 0, 0, sampling, 0)
    return echo_of(result, tokenizer, {tokenizer.of_transformers.eos_token_id})


@pytest.mark.parametrize("text", ["a b a a", "over the sea", "a é 你 🎉 b"])
def test_wherever_a_text_is_cut_its_echo_is_the_whole(tokenizer, text):
    tokens = tokenizer.encode(text)
    for cut in range(1, len(tokens)):
        assert echo(tokenizer, tokens[:cut], tokens[cut:]) == tokenizer.decode(tokens)


def test_the_end_and_what_follows_a_stop_string_are_not_shown(tokenizer):
    prompt, tokens = tokenizer.encode("over the"), tokenizer.encode(" sea and the land")
    end = tokenizer.of_transformers.eos_token_id
    whole = tokenizer.decode([*prompt, *tokens])
    assert echo(tokenizer, prompt, [*tokens, end]) == whole
    # The stop string of the prompt's own text does not count.
    assert echo(tokenizer, prompt, tokens, ("the",)) == whole[: whole.rindex("the")]
