"""While one engine serves under its strict sentinel, others warm up and the user compiles."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from transformers.utils import output_capturing

from compiled_attn.engine import Engine, SamplingParams
from compiled_attn.models.hf.output_registry import use_own_entries
from graphs import GraphBudgetExceeded
from graphs.capture.inputs import with_own_code
from tests.compiled_attn.engine.small import greedy, plain, small_engine
from tests.compiled_attn.tiny import tiny_model

PROMPTS = [[1, 2, 3, 4, 5], [6, 7], [1, 2, 3, 4, 9, 8]]
SAMPLING = SamplingParams(max_new_tokens=5)


_model = partial(tiny_model, num_hidden_layers=1)


def _engine(backend: str = "eager", **config) -> Engine:
    return small_engine(_model(), backend=backend, max_tokens_per_step=16, max_graphs=1, **config)


def _assert_serves(engine: Engine) -> None:
    assert greedy(engine, PROMPTS, 5) == plain(_model(), PROMPTS, 5)


@contextmanager
def _in_the_middle_of_a_step(engine: Engine) -> Iterator[None]:
    """Another thread serves with an engine, and stands still inside of its first step."""
    inside, go_on = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    module = engine.executor.module
    compute = module.compute

    def wait(*given: object) -> torch.Tensor:
        inside.set()
        go_on.wait(60)
        return compute(*given)

    def serve() -> None:
        try:
            _assert_serves(engine)
        except BaseException as error:
            errors.append(error)

    module.compute = wait  # a hook of the model would be a change of it
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert inside.wait(60)
        yield
    finally:
        del module.compute
        go_on.set()
        thread.join()
    assert not errors


def _compile_something() -> None:
    function = torch.compile(with_own_code(lambda x: x + 2, "of_the_user"), backend="eager")
    assert function(torch.ones(2)).tolist() == [3, 3]


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_a_later_model_of_another_class_leaves_the_graphs_valid(family):
    """Models look up what their class can record in one dictionary of all classes."""
    model = tiny_model(family, num_hidden_layers=2)
    engine = small_engine(model, backend="aot_eager", max_tokens_per_step=16, max_graphs=1)
    before = greedy(engine, PROMPTS, 2)
    known = len(output_capturing._CAN_RECORD_REGISTRY._registry)
    other = next(each for each in ("cohere", "starcoder2", "olmo2") if not _is_made(each))
    later = tiny_model(other)
    assert len(output_capturing._CAN_RECORD_REGISTRY._registry) > known
    assert greedy(engine, PROMPTS, 2) == before
    use_own_entries(later)  # as another engine does
    assert greedy(engine, PROMPTS, 2) == before
    assert later(torch.tensor([[1, 2]]), output_hidden_states=True).hidden_states is not None


def _is_made(family: str) -> bool:
    registry = output_capturing._CAN_RECORD_REGISTRY
    return any(f".{family}." in each for each in registry._registry)


def test_an_engine_warms_up_and_serves_while_another_one_is_in_the_middle_of_a_step():
    serving = _engine()
    with _in_the_middle_of_a_step(serving):
        other = _engine("aot_eager")
        _assert_serves(other)
        _compile_something()
    for engine in (serving, other):
        report = engine.report()
        assert (report.compiles_after_warmup, report.graph_breaks) == (0, 0)


def test_a_step_in_another_thread_does_not_excuse_a_late_compile_in_this_one():
    serving = _engine()
    late = torch.compile(lambda x: x * 3, backend="eager")
    serving.executor.graphs.run = lambda bucket, *inputs: late(torch.zeros(3))
    other = _engine()
    with (
        _in_the_middle_of_a_step(other),
        pytest.raises(GraphBudgetExceeded, match="compile of <lambda>"),
    ):
        list(serving.generate([[1, 2, 3]], SAMPLING))


def test_two_engines_and_the_user_take_turns_in_one_thread():
    first = _engine()
    tokens = first.stream(PROMPTS, SAMPLING)
    next(tokens)
    second = _engine("aot_eager")
    others = second.stream(PROMPTS, SAMPLING)
    served: list[list[int]] = [[], []]
    for event, other in zip(tokens, others, strict=False):
        _compile_something()
        served[0].append(event.token)
        served[1].append(other.token)
    assert len(served[1]) >= 14 and served[1][1:] == served[0][: len(served[1]) - 1]
    assert first.report().compiles_after_warmup == second.report().compiles_after_warmup == 0


def test_an_engine_that_watches_the_process_refuses_what_other_threads_compile_in_its_steps():
    serving = _engine(watch_process=True)
    with _in_the_middle_of_a_step(serving), pytest.raises(GraphBudgetExceeded):
        _compile_something()
