"""Our engine in the place of the continuous batching of transformers."""

from __future__ import annotations

import asyncio
import threading

import pytest

pytest.importorskip("transformers", reason="needs the extra hf")

from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousMixin,
)

from compiled_attn.contrib import transformers as contrib
from compiled_attn.contrib.transformers import install, uninstall
from compiled_attn.contrib.transformers.manager import EngineManager, sampling_for
from compiled_attn.engine import EngineConfig, SamplingParams
from compiled_attn.errors import EngineUnsupported
from tests.compiled_attn.tiny import plain_generate, tiny_model

CONFIG = EngineConfig(backend="eager", context=128, max_seqs=4, max_graphs=4, num_blocks=40)
PROMPTS = [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11], [3] * 40]
GREEDY = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
OWN = ContinuousMixin.init_continuous_batching


@pytest.fixture(autouse=True)
def _as_it_was():
    yield
    uninstall()
    assert ContinuousMixin.init_continuous_batching is OWN


@pytest.fixture
def model():
    return tiny_model("qwen3")


def _tokens(answers):
    return [answer.generated_tokens for answer in answers.values()]


def _serving(model, settings=GREEDY):
    return model.continuous_batching_context_manager(settings)


def test_generate_batch_answers_what_generate_does_and_the_model_is_as_it_was(model):
    expected = [plain_generate(model, prompt, 8) for prompt in PROMPTS]
    before = model.config._attn_implementation
    with install(CONFIG):
        answers = model.generate_batch(PROMPTS, GREEDY)
    assert _tokens(answers) == expected
    assert [answer.prompt_ids for answer in answers.values()] == PROMPTS
    assert all(answer.is_finished() and answer.error is None for answer in answers.values())
    assert model.config._attn_implementation == before
    assert plain_generate(model, PROMPTS[0], 8) == expected[0]


def test_the_tokens_are_those_of_the_continuous_batching_that_is_replaced(model):
    sizes = ContinuousBatchingConfig(page_size=32, num_blocks=64, max_batch_tokens=64)
    model.set_attn_implementation("sdpa")
    own = _tokens(model.generate_batch(PROMPTS, GREEDY, continuous_batching_config=sizes))
    with install(CONFIG):
        assert _tokens(model.generate_batch(PROMPTS, GREEDY)) == own
    assert _tokens(model.generate_batch(PROMPTS, GREEDY, continuous_batching_config=sizes)) == own


def test_a_second_call_finds_the_engine_warm(model):
    with install(CONFIG):
        first = _tokens(model.generate_batch(PROMPTS, GREEDY))
        with _serving(model) as manager:
            engine, report = manager.engine, manager.engine.warmup_report
        with _serving(model) as manager:
            assert manager.engine is engine
            assert engine.warmup_report is report
        assert _tokens(model.generate_batch(PROMPTS, GREEDY)) == first


def test_an_end_token_ends_a_text(model):
    whole = plain_generate(model, PROMPTS[1], 8)
    settings = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=[whole[2]])
    with install(CONFIG):
        (answer,) = _tokens(model.generate_batch(PROMPTS[1:2], settings))
    assert answer == whole[: whole.index(whole[2]) + 1]


def test_several_continuations_are_named_as_transformers_names_them(model):
    settings = GenerationConfig(
        max_new_tokens=4, do_sample=True, num_return_sequences=3, eos_token_id=-1
    )
    with install(CONFIG):
        answers = model.generate_batch(PROMPTS[:2], settings)
    assert [*answers] == [
        name for i in (0, 1) for name in (f"req_{i}__child#0", f"req_{i}__child#1", f"req_{i}")
    ]
    assert all(len(tokens) == 4 for tokens in _tokens(answers))


def test_a_stream_tells_all_tokens_so_far_in_the_event_loop_as_the_server_reads_it(model):
    expected = plain_generate(model, PROMPTS[0], 8)
    received, threads = [], set()

    async def read(manager):
        finished = asyncio.Event()

        def handle(result):
            received.append([*result.generated_tokens])
            threads.add(threading.current_thread())
            if result.is_finished():
                finished.set()

        manager.register_result_handler("a", handle)
        manager.add_request(PROMPTS[0], request_id="a", streaming=True)
        await asyncio.wait_for(finished.wait(), 60)

    with install(CONFIG), _serving(model) as manager:
        asyncio.run(read(manager))
    assert received == [expected[:n] for n in range(1, 9)]
    assert threads == {threading.current_thread()}


def test_a_cancelled_request_gives_its_blocks_back_and_others_go_on(model):
    expected = plain_generate(model, PROMPTS[1], 8)
    with install(CONFIG), _serving(model) as manager:
        manager.add_request(PROMPTS[0], request_id="gone", max_new_tokens=100, streaming=True)
        assert manager.get_result(timeout=60).request_id == "gone"
        manager.cancel_request("gone")
        manager.add_request(PROMPTS[1], request_id="second")
        while (result := manager.get_result(timeout=60)).request_id != "second":
            assert not result.is_finished()
        assert result.generated_tokens == expected
        manager.stop()
        assert manager.engine.pool.stats().used == 0


def test_a_request_that_can_never_be_served_fails_alone(model):
    with install(CONFIG), _serving(model) as manager:
        manager.add_request([1] * 300, request_id="long", max_new_tokens=4)
        manager.add_request(PROMPTS[0], request_id="short")
        results = {each.request_id: each for each in (manager.get_result(timeout=60) for _ in "ab")}
    assert "context" in results["long"].error
    assert len(results["short"].generated_tokens) == 8
    assert manager.background_thread_status.fatal_error is None


def test_a_step_that_fails_reaches_every_request_and_the_status(model, monkeypatch):
    def fail():
        raise RuntimeError("the step failed")

    with install(CONFIG), _serving(model) as manager:
        monkeypatch.setattr(manager.engine, "step", fail)
        manager.add_request(PROMPTS[0], request_id="a")
        assert manager.get_result(timeout=60).error == "the step failed"
        manager.stop()
        assert str(manager.background_thread_status.fatal_error) == "the step failed"
        with pytest.raises(RuntimeError, match="expected a running manager"):
            manager.add_request(PROMPTS[0])


def test_a_hard_stop_ends_what_is_open_with_an_error(model):
    with install(CONFIG), _serving(model) as manager:
        manager.add_request(PROMPTS[0], request_id="a", max_new_tokens=100, streaming=True)
        assert manager.get_result(timeout=60).request_id == "a"
        manager.stop(hard_stop=True)
        results = [*manager]
        assert results[-1].error == "the manager was stopped before the request finished"
        with pytest.raises(RuntimeError, match="got one that was stopped"):
            manager.add_request(PROMPTS[0])


def test_a_second_manager_does_not_serve_beside_the_first(model):
    with install(CONFIG), _serving(model):
        second = model.init_continuous_batching(GREEDY)
        with pytest.raises(RuntimeError, match="got one with a running"):
            second.start()


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"num_beams": 2}, "num_beams"), ({"no_repeat_ngram_size": 2}, "NoRepeatNGram")],
)
def test_settings_that_the_engine_has_not_are_refused_before_anything_is_served(
    model, settings, named
):
    with install(CONFIG), pytest.raises(EngineUnsupported, match=named):
        model.init_continuous_batching(GenerationConfig(**settings))


def test_uninstalling_twice_or_installing_again_leaves_transformers_own_way_back():
    with install(), install(CONFIG):
        assert ContinuousMixin.init_continuous_batching is not OWN
    uninstall()
    assert ContinuousMixin.init_continuous_batching is OWN


@pytest.mark.parametrize("version", ["5.22.0", "5.230.1", "5.25.0", "6.0", None])
def test_a_version_that_was_not_tested_is_one_line_with_the_range(monkeypatch, version):
    monkeypatch.setattr(contrib, "installed", lambda *_: version)
    with pytest.raises(EngineUnsupported) as caught:
        install()
    assert "expected transformers 5.23.* or 5.24.*, which" in str(caught.value)
    assert f"got {version or 'none'}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_manager_of_transformers_server_is_answered_by_our_engine(model):
    from transformers.cli.serving.utils import CBGenerateManager

    class Words:
        def decode(self, tokens, skip_special_tokens):
            return " ".join(map(str, tokens))

    async def ask(server):
        inputs = {"input_ids": PROMPTS[0]}
        return await server.generate_non_streaming(model, Words(), inputs, GREEDY, request_id="a")

    expected = plain_generate(model, PROMPTS[0], 8)
    with install(CONFIG):
        server = CBGenerateManager()
        server.init_cb(model, GREEDY)
    assert isinstance(server._cb, EngineManager)
    assert asyncio.run(ask(server)) == (" ".join(map(str, expected)), 4, expected)
    assert server.is_alive()
    server.stop()


SAMPLED = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2}


def test_all_sampling_settings_are_converted():
    sampling = sampling_for(
        tiny_model(), GenerationConfig(do_sample=True, **SAMPLED), [7, -1], 9, 2
    )
    expected = SamplingParams(
        max_new_tokens=9, stop_token_ids=(7,), ignore_eos=True, n=2, **SAMPLED
    )
    assert sampling == expected


def test_a_greedy_text_has_no_temperature_but_its_penalty():
    settings = GenerationConfig(do_sample=False, temperature=0.7, repetition_penalty=1.2)
    sampling = sampling_for(tiny_model(), settings, [], 3)
    assert (sampling.temperature, sampling.repetition_penalty) == (0.0, 1.2)


def test_missing_settings_have_the_defaults_of_transformers():
    sampling = sampling_for(tiny_model(), GenerationConfig(do_sample=True), [], 3)
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (1.0, 1.0, 0.0)
