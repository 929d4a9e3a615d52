"""Stop strings end a request in the step that completes them; without a text they are refused."""

from __future__ import annotations

import pytest

from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.errors import ConfigError
from tests.compiled_attn.tiny import plain_generate, tiny_model

PROMPT = [5, 6, 7]
CONFIG = EngineConfig(backend="eager", max_seqs=4, max_tokens_per_step=16, max_graphs=4)


def spelled(tokens: list[int]) -> str:
    return "".join(f"{token}," for token in tokens)


def has_stop(tokens: list[int], stop: tuple[str, ...]) -> bool:
    return any(each in spelled(tokens) for each in stop)


def test_a_request_ends_with_the_token_that_completes_its_stop_string():
    model = tiny_model()
    tokens = plain_generate(model, PROMPT, 12)
    stop = spelled(tokens[4:7])[:-1]
    engine = Engine(model, CONFIG, has_stop=has_stop)
    engine.warmup()
    sampling = [SamplingParams(max_new_tokens=12, stop=stop), SamplingParams(max_new_tokens=12)]
    stopped, other = engine.generate([PROMPT, PROMPT], sampling, in_order=True)
    end = next(n for n in range(1, 13) if has_stop(tokens[:n], (stop,)))
    assert stopped.tokens == tokens[:end] and stopped.finish_reason == "stop"
    assert other.tokens == tokens and other.finish_reason == "length"
    assert engine.report().generated_tokens == end + 12
    assert engine.pool.stats().used == 0


def test_min_tokens_holds_no_stop_string_back():
    model = tiny_model()
    tokens = plain_generate(model, PROMPT, 3)
    engine = Engine(model, CONFIG, has_stop=has_stop)
    engine.warmup()
    params = SamplingParams(max_new_tokens=12, min_tokens=9, stop=spelled(tokens))
    (result,) = engine.generate([PROMPT], params)
    assert (result.tokens, result.finish_reason) == (tokens, "stop")


def test_an_engine_without_text_refuses_them_with_the_remedy():
    engine = Engine(tiny_model(), CONFIG)
    message = r"expected no stop strings, as this engine has no tokenizer, got \('END',\): use comp"
    with pytest.raises(ConfigError, match=message):
        engine.submit(PROMPT, SamplingParams(stop="END"))
    with pytest.raises(ConfigError, match=message):
        engine.stream([PROMPT], SamplingParams(stop="END"))
