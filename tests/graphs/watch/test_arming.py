import logging
import subprocess
import threading

import pytest
import torch

from graphs import GraphBudgetExceeded, capture, no_compile
from graphs.capture.inputs import with_own_code


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()


def warm(function, *inputs):
    compiled = torch.compile(function, backend="eager", dynamic=False)
    compiled(*inputs)
    return compiled


def state():
    handler = torch._dynamo.callback.callback_handler
    return (
        [*handler.start_callbacks],
        [*handler.end_callbacks],
        [*logging.getLogger("torch._dynamo.convert_frame").handlers],
        vars(torch._dynamo.eval_frame._stance).copy(),
        torch._dynamo.config.save_config(),
    )


def test_it_leaves_no_state_behind_also_after_an_error():
    compiled = warm(lambda x: x + 1, torch.ones(1))
    before = state()
    with no_compile(strict=False), no_compile():
        with pytest.raises(GraphBudgetExceeded):
            compiled(torch.ones(2))
        assert state() != before
    with pytest.raises(ZeroDivisionError), no_compile():
        _ = 1 / 0
    assert state() == before
    capture(lambda x: x, [torch.ones(1)], backend="eager")
    with pytest.raises(GraphBudgetExceeded), no_compile(strict=False), no_compile():
        compiled(torch.ones(3))
    assert state() == before


def test_they_nest_and_may_end_in_any_order():
    compiled = warm(lambda x: x + 1, torch.ones(1))
    outer, inner = no_compile(strict=False).arm(), no_compile(strict=True).arm()
    with pytest.raises(GraphBudgetExceeded):
        compiled(torch.ones(2))
    outer.disarm()
    with pytest.raises(GraphBudgetExceeded):
        compiled(torch.ones(2))
    inner.disarm()
    compiled(torch.ones(2))
    assert (outer.compiles, inner.compiles) == (1, 2)


def test_a_strict_one_outside_is_not_relaxed_from_inside():
    compiled = warm(lambda x: x + 1, torch.ones(1))
    with no_compile(), no_compile(strict=False), pytest.raises(GraphBudgetExceeded):
        compiled(torch.ones(2))


def test_it_can_be_armed_and_disarmed_by_hand_and_again():
    compiled = warm(lambda x: x + 1, torch.ones(1))
    sentinel = no_compile(strict=False)
    compiled(torch.ones(2))
    sentinel.arm()
    with pytest.raises(RuntimeError, match="armed already"):
        sentinel.arm()
    compiled(torch.ones(3))
    sentinel.disarm()
    sentinel.disarm()
    compiled(torch.ones(4))
    with sentinel:
        compiled(torch.ones(5))
    assert sentinel.compiles == 2


def errors_in_another_thread(work):
    errors = []

    def guarded():
        try:
            work()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    return errors


def build():
    subprocess.run(["cc", "nothing.c"], capture_output=True)


def late_capture():
    capture(lambda x: x, [torch.ones(1)], backend="eager")


def a_first_compile():
    warm(with_own_code(lambda x: x - 5, "minus_five"), torch.ones(1))


@pytest.mark.parametrize("work", [a_first_compile, build, late_capture])
def test_what_other_threads_do_is_theirs_unless_the_process_is_watched(work):
    with no_compile() as sentinel:
        assert errors_in_another_thread(work) == []
        assert sentinel.events == ()
        with pytest.raises(GraphBudgetExceeded):
            work()
    with no_compile(all_threads=True) as sentinel:
        (error,) = errors_in_another_thread(work)
    assert isinstance(error, GraphBudgetExceeded)
    assert [event.thread == threading.get_ident() for event in sentinel.events] == [False]


def test_a_late_build_is_seen_while_another_thread_compiles():
    inside, done = threading.Event(), threading.Event()

    def slow_compiler(graph, inputs):
        inside.set()
        done.wait(60)
        return graph.forward

    def compile_slowly():
        torch.compile(lambda x: x + 9, backend=slow_compiler)(torch.ones(2))

    thread = threading.Thread(target=compile_slowly)
    with no_compile() as sentinel:
        thread.start()
        try:
            assert inside.wait(60)
            with pytest.raises(GraphBudgetExceeded, match=r"build of nothing\.c"):
                build()
        finally:
            done.set()
            thread.join()
    assert [event.kind for event in sentinel.events] == ["build"]


def test_a_sentinel_that_ends_in_the_middle_of_a_compile_does_not_blind_the_next_one(monkeypatch):
    compiled = warm(lambda x: x + 1, torch.ones(1))
    first, second = no_compile(all_threads=True), no_compile(all_threads=True)
    monkeypatch.setattr(first, "_started", lambda trigger: first.disarm())
    first.arm()
    with second, pytest.raises(GraphBudgetExceeded):
        compiled(torch.ones(2))
    assert len(second.events) == 1


def test_a_reset_of_dynamo_is_logged_at_the_end(caplog):
    with caplog.at_level("WARNING", "graphs"), no_compile():
        torch._dynamo.reset()
    assert "compiles after it were not seen" in caplog.text
