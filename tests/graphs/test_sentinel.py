import logging
import threading

import pytest
import torch
from torch import nn

from graphs import GraphBudgetExceeded, ModeMismatch, capture, no_compile

FACTOR = 2


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.offset = 1

    def forward(self, x):
        return x * FACTOR + self.offset


def warm(function, *inputs, **options):
    compiled = torch.compile(function, backend="eager", dynamic=False, **options)
    compiled(*inputs)
    return compiled


def with_new_shape(compiled, module):
    compiled(torch.ones(3, 4))


def with_new_dtype(compiled, module):
    compiled(torch.ones(4, 4, dtype=torch.float64))


def with_new_stride(compiled, module):
    compiled(torch.ones(4, 4).t())


def under_another_grad_mode(compiled, module):
    with torch.no_grad():
        compiled(torch.ones(4, 4))


def with_more_threads(compiled, module):
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        compiled(torch.ones(4, 4))
    finally:
        torch.set_num_threads(threads)


def after_a_changed_attribute(compiled, module):
    module.offset = 5
    compiled(torch.ones(4, 4))


def after_a_changed_global(compiled, module):
    globals()["FACTOR"] = 7
    compiled(torch.ones(4, 4))


def with_a_new_callable(compiled, module):
    torch.compile(lambda x: x - 1, backend="eager")(torch.ones(4, 4))


def with_a_graph_break(compiled, module):
    def broken(x):
        torch._dynamo.graph_break()
        return x + 1

    torch.compile(broken, backend="eager")(torch.ones(4, 4))


CASES = [
    (with_new_shape, "recompile", "size mismatch at index 0. expected 4, actual 3"),
    (with_new_dtype, "recompile", "dtype mismatch"),
    (with_new_stride, "recompile", "stride mismatch"),
    (under_another_grad_mode, "recompile", "grad_mode"),
    (with_more_threads, "recompile", "num_threads"),
    (after_a_changed_attribute, "recompile", "offset"),
    (after_a_changed_global, "recompile", "FACTOR"),
    (with_a_new_callable, "compile", "compile of <lambda>"),
    (with_a_graph_break, "compile", "compile of broken"),
]


@pytest.fixture(autouse=True)
def nothing_compiled_and_factor_restored():
    torch._dynamo.reset()
    yield
    globals()["FACTOR"] = 2


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize(("change", "kind", "cause"), CASES)
def test_a_late_compile_is_an_error_that_names_its_cause(change, kind, cause, fullgraph):
    module = Scaled()
    compiled = warm(module, torch.ones(4, 4), fullgraph=fullgraph)
    with no_compile() as sentinel:
        compiled(torch.ones(4, 4))
        with pytest.raises(GraphBudgetExceeded) as caught:
            change(compiled, module)
    assert cause in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.event.kind == kind
    assert [event.kind for event in sentinel.events] == [kind]


@pytest.mark.parametrize(("change", "kind", "cause"), CASES)
def test_a_late_compile_is_counted_and_warned_of_once_otherwise(change, kind, cause, caplog):
    module = Scaled()
    compiled = warm(module, torch.ones(4, 4))
    with caplog.at_level("WARNING", "graphs"), no_compile(strict=False) as sentinel:
        change(compiled, module)
    assert sentinel.compiles >= 1
    assert sentinel.events[0].kind == kind
    assert cause in caplog.messages[0]
    assert len(caplog.messages) == len({event.function for event in sentinel.events})


def test_the_same_cause_is_logged_once_and_counted_each_time(caplog):
    compiled = warm(lambda x: x + 1, torch.ones(1))
    with caplog.at_level("WARNING", "graphs"), no_compile(strict=False) as sentinel:
        for size in range(2, 6):
            compiled(torch.ones(size))
    assert sentinel.compiles == 4
    assert len(caplog.messages) == 1


def test_graph_breaks_are_counted_when_they_are_let_through():
    with no_compile(strict=False) as sentinel:
        with_a_graph_break(None, None)
    assert sentinel.graph_breaks == 1
    assert sentinel.compiles == 2


@pytest.mark.parametrize("strict", [True, False])
def test_a_function_beyond_its_recompile_limit_does_not_run_eagerly_unseen(strict):
    with torch._dynamo.config.patch(recompile_limit=1):
        compiled = warm(lambda x: x + 1, torch.ones(1))
        with no_compile(strict=strict) as sentinel:
            if strict:
                with pytest.raises(GraphBudgetExceeded, match="refused recompile"):
                    compiled(torch.ones(2))
            else:
                assert compiled(torch.ones(2)).tolist() == [2, 2]
    assert (sentinel.limit_hits, sentinel.compiles) == (1, 0)


def test_nothing_is_compiled_by_a_strict_refusal_and_all_works_again_afterwards():
    compiled = warm(Scaled(), torch.ones(4, 4))
    for _ in range(2):
        with no_compile(), pytest.raises(GraphBudgetExceeded):
            compiled(torch.ones(3, 4))
    assert compiled(torch.ones(3, 4)).unique().tolist() == [3]
    with no_compile():
        compiled(torch.ones(3, 4))
        compiled(torch.ones(4, 4))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_late_capture_is_caught_for_every_backend(backend):
    ran = torch.zeros(1)
    with no_compile(), pytest.raises(GraphBudgetExceeded, match=r"capture of decode\[tokens=3\]"):
        capture(lambda x: ran.add_(x), [torch.ones(1)], backend=backend, name="decode[tokens=3]")
    assert ran.item() == 0
    with no_compile(strict=False) as sentinel:
        capture(lambda x: ran.add_(x), [torch.ones(1)], backend=backend)
    assert sentinel.late_captures == 1 and ran.item() == 1


@pytest.fixture
def graph():
    with torch.no_grad():
        yield capture(Scaled(), [torch.ones(4, 4)], backend="aot_eager", name="decode[tokens=4]")


def test_a_captured_graph_whose_guard_fails_is_named(graph):
    globals()["FACTOR"] = 9
    with no_compile(), pytest.raises(GraphBudgetExceeded) as caught:
        graph.run(torch.ones(4, 4))
    text = str(caught.value)
    assert "recompile of decode[tokens=4]: " in text and "FACTOR" in text


def test_a_captured_graph_catches_another_thread_count_or_grad_mode_itself(graph):
    with no_compile() as sentinel:
        graph.run(torch.ones(4, 4))
        with torch.enable_grad(), pytest.raises(ModeMismatch, match="grad_enabled"):
            graph.run(torch.ones(4, 4))
        threads = torch.get_num_threads()
        torch.set_num_threads(threads + 1)
        try:
            with pytest.raises(ModeMismatch, match="threads"):
                graph.run(torch.ones(4, 4))
        finally:
            torch.set_num_threads(threads)
    assert sentinel.events == ()


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


def test_compiles_of_other_threads_count_unless_left_out():
    compiled = warm(lambda x: x + 1, torch.ones(1))
    with no_compile():
        (error,) = errors_in_another_thread(lambda: compiled(torch.ones(2)))
    assert isinstance(error, GraphBudgetExceeded)
    with no_compile(all_threads=False) as sentinel:
        assert errors_in_another_thread(lambda: compiled(torch.ones(2))) == []
        assert sentinel.events == ()
        with pytest.raises(GraphBudgetExceeded):
            compiled(torch.ones(3))


def test_a_reset_of_dynamo_meanwhile_is_told(caplog):
    with caplog.at_level("WARNING", "graphs"), no_compile():
        torch._dynamo.reset()
    assert "compiles after it were not seen" in caplog.text
