"""Ctrl-C waits for the end of a step, and an exception in a step rolls it back."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.engine.steps import StepResult, Transactions, delayed_interrupt
from tests.compiled_attn.engine.counting import warm_engine
from tests.compiled_attn.engine.small import rest_of, small_engine
from tests.compiled_attn.tiny import plain_generate, tiny_model
from tests.fake_device import counts, open_device

NEW = 7
PARAMS = SamplingParams(max_new_tokens=NEW)


def _prompts() -> list[list[int]]:
    """Prompts that share blocks."""
    rng = random.Random(5)
    common = [rng.randrange(1, 128) for _ in range(11)]
    tails = [[rng.randrange(1, 128) for _ in range(rng.randrange(1, 9))] for _ in range(6)]
    return [common[: rng.randrange(6, 12)] + tail for tail in tails] + [tails[0], common]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    model = tiny_model()
    return [plain_generate(model, prompt, NEW) for prompt in _prompts()]


@pytest.fixture(autouse=True)
def _default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _interrupt_launches(engine: Engine, times: int = 1) -> None:
    """Presses Ctrl-C in the next launch."""
    launch = engine.executor.launch

    def with_interrupt(step):
        engine.executor.launch = launch
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        return launch(step)

    engine.executor.launch = with_interrupt


def test_an_interrupted_step_is_finished_and_the_next_returns_its_tokens(expected):
    engine, prompts = small_engine(), _prompts()
    requests = [engine.submit(prompt, PARAMS) for prompt in prompts[:3]]
    for interrupts in range(1, 4):
        _interrupt_launches(engine)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert engine.tally.count("steps") == interrupts
    assert rest_of(engine) == dict(zip(requests, expected, strict=False))
    assert engine.restarts == 0 and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_stops_the_step_at_once_and_it_is_computed_again(expected):
    engine = small_engine()
    request = engine.submit(_prompts()[0], PARAMS)
    _interrupt_launches(engine, times=2)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.restarts == 1 and rest_of(engine) == {request: expected[0]}


def test_an_interrupted_stream_leaves_its_events_and_an_idle_engine():
    engine, prompts = small_engine(), [[3, 4, 5], [6, 7], [8, 9, 10, 11]]
    expected = [plain_generate(engine.executor.module.model, prompt, NEW) for prompt in prompts]
    by_hand = engine.submit(prompts[0], PARAMS)
    _interrupt_launches(engine)
    stream = engine.stream(prompts[1:3], PARAMS)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert {event.token for event in stream} == {expected[1][0], expected[2][0]}
    assert engine.open_requests == {by_hand} and not engine.is_streaming
    results = engine.generate(prompts, PARAMS, in_order=True)
    assert [result.tokens for result in results] == expected
    assert [event.token for event in engine.step()] == expected[0]


def test_a_request_whose_submission_is_interrupted_is_not_queued(monkeypatch, expected):
    engine = small_engine()
    add = engine.scheduler.add

    def with_interrupt(sequence):
        add(sequence)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine.scheduler, "add", with_interrupt)
        engine.submit(_prompts()[1], PARAMS)
    assert not engine.open_requests and not engine.has_work
    request = engine.submit(_prompts()[0], PARAMS)
    assert rest_of(engine) == {request: expected[0]}


def test_an_exception_at_any_line_of_a_commit_neither_loses_nor_repeats_an_event():
    for at in itertools.count():
        engine = warm_engine()
        requests = [engine.submit([n], SamplingParams(max_new_tokens=n // 10)) for n in (10, 20)]
        if not _raises_in_commit(engine, at):
            break
        events = engine.take_events()
        while engine.has_work:
            events += engine.step()
        assert [(event.request_id, event.token) for event in events] == [
            (requests[0], 11),
            (requests[1], 21),
            (requests[1], 22),
        ]
    assert at > 20


def _raises_in_commit(engine: Engine, at: int) -> bool:
    """Runs a step which raises at a line of its commit; False: it has fewer lines."""
    lines, commit = iter(range(at)), StepResult.commit.__code__

    def trace(frame, event, _):
        if frame.f_code is not commit and frame.f_back.f_code is not commit:
            return None
        if event == "line" and next(lines, None) is None:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        engine.advance()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_a_change_does_not_begin_in_another_thread_or_within_another_one():
    def change() -> None:
        results.append(transactions.run(lambda: results.append("within")))
        thread = threading.Thread(
            target=lambda: results.append(transactions.run(lambda: results.append("overlaps")))
        )
        thread.start()
        thread.join()

    transactions, results = Transactions(lambda: None), []
    assert transactions.run(change) and results == [False, False]


def test_other_threads_do_not_touch_the_handler():
    def delay() -> None:
        with delayed_interrupt():
            seen.append(signal.getsignal(signal.SIGINT))

    seen: list[object] = []
    thread = threading.Thread(target=delay)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


@pytest.mark.parametrize(
    ("kernel", "device"), [("portable", "cpu"), ("auto", "cpu"), ("auto", "fake_device")]
)
def test_exceptions_anywhere_in_steps_lose_no_token_and_no_block(kernel, device, expected):
    """Requests are preempted, and share and move blocks, while random calls of steps fail."""
    torn = 0
    if is_ahead := device != "cpu":
        open_device()
        torn = counts().torn  # so far, by other tests
    sizes = {"max_tokens_per_step": 48, "num_blocks": 14, "max_graphs": 3, "defrag_waste": 0.0}
    engine = small_engine(tiny_model().to(device), kernel=kernel, **sizes)
    rng, prompts = random.Random(1), _prompts()
    calls = iter(range(10**6))
    for owner, name in (
        (engine.executor, "plan"),
        (engine.executor, "launch"),
        (engine.executor.copies, "move"),
        (engine.tally, "add"),
        (engine.scheduler, "commit"),
        (engine.scheduler, "finish"),
    ):
        _fail_sometimes(owner, name, rng, calls)
    received: dict[int, list[int]] = {}
    of: dict[int, int] = {}
    failures = 0
    while len(of) < 60 or engine.has_work:
        while len(of) < 60 and len(engine.open_requests) < 6:
            which = len(of) % len(prompts)
            of[engine.submit(prompts[which], PARAMS)] = which
        try:
            events = engine.step()
        except ZeroDivisionError:
            failures += 1
            continue
        for event in events:
            received.setdefault(event.request_id, []).append(event.token)
    assert received == {request: expected[which] for request, which in of.items()}
    assert engine.pool.stats().used == 0 and not engine.pool.requests
    report = engine.report()
    assert failures > 5 and 0 < report.restarts <= failures and report.failed_requests == 0
    assert report.preemptions and report.prefix_hit_ratio and report.memory["defrag_moves"]
    assert bool(report.steps_ahead) == is_ahead
    assert not is_ahead or counts().torn == torn


def _fail_sometimes(owner, name, rng, calls) -> None:
    function = getattr(owner, name)

    def failing(*args, **kwargs):
        if rng.random() < 0.05:
            raise ZeroDivisionError(next(calls))
        return function(*args, **kwargs)

    setattr(owner, name, failing)


def _serve_while_interrupted() -> None:
    prompts = [[3, 4, 5], [6, 7], [8, 9, 10, 11]]
    engine = Engine(tiny_model(), EngineConfig(24, 4, 4, num_blocks=20, backend="eager"))
    engine.warmup()
    rng, tokens, of, interrupts = random.Random(2), {}, {}, 0
    while len(of) < 150 or engine.has_work:
        while len(of) < 150 and len(engine.open_requests) < 4:
            of[engine.submit(prompts[len(of) % 3], SamplingParams(max_new_tokens=5))] = len(of) % 3
        timer = threading.Timer(rng.uniform(0, 4e-3), os.kill, (os.getpid(), signal.SIGINT))
        events = []
        try:
            timer.start()
            events = engine.step()
            timer.join()
        except KeyboardInterrupt:
            interrupts += 1
        for event in events:
            tokens.setdefault(event.request_id, []).append(event.token)
    expected = [plain_generate(engine.executor.module.model, prompt, 5) for prompt in prompts]
    assert interrupts > 50
    # A signal after the step may take its events from the caller.
    assert sum(tokens.get(each) != expected[which] for each, which in of.items()) <= interrupts // 2
    assert engine.pool.stats().used == 0 and engine.restarts <= interrupts // 10


def test_real_signals_at_any_moment_leave_a_whole_engine():
    child = multiprocessing.get_context("spawn").Process(target=_serve_while_interrupted)
    child.start()
    child.join(240)
    exitcode = child.exitcode
    child.kill()
    assert exitcode == 0, "the traceback is on stderr; None: it hangs"
