"""What users do to `graphs.bucketed` unawares: an error, or the result of the callable."""

from __future__ import annotations

import copy
import dataclasses
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import graphs
from graphs.bucketed import plan
from graphs.errors import BucketedError, BucketOverflow, CaptureError, InputMismatch


def rows_of(function, *example, **options):
    options = {"rows": (1, 8), "backend": "eager", **options}
    given = options.pop("example", example or (torch.randn(3, 4),))
    return graphs.bucketed(function, given, **options)


def warmed(function, *example, **options):
    wrapped = rows_of(function, *example, **options)
    wrapped.warmup()
    return wrapped


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def poison(wrapped):
    """Write NaN into all buffers that calls share."""
    for variant, _ in wrapped._members.values():
        variant.plans.last = None
        for memory in variant.plans._buffers.values():
            memory.fill_(float("nan") if memory.is_floating_point() else 77)


# Results that would be wrong without an error


@pytest.mark.parametrize("fails", ["copy", "run"])
def test_an_exception_in_a_call_leaves_no_values_in_the_padding_of_the_next(monkeypatch, fails):
    wrapped = warmed(lambda x: (x, x.sum(0)))
    first, larger = torch.ones(2, 4), torch.full((7, 4), 9.0)
    short = torch.full((5, 4), 9.0)
    for each in (short, first, larger, short):
        wrapped(each)
    original = plan.copy_all

    def broken(targets, sources):
        original(targets, sources)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if fails == "copy":
            patched.setattr(plan, "copy_all", broken)
        else:
            patched.setattr(graphs.CapturedGraph, "run", lambda *_: 1 / 0)
        with pytest.raises((KeyboardInterrupt, ZeroDivisionError)):
            wrapped(larger)
    assert torch.equal(wrapped(short)[1], short.sum(0))


def test_buffers_full_of_other_values_do_not_show():
    wrapped = warmed(lambda x, y: (x.sum(0), (x + y).sum(0)), *[torch.randn(3, 4)] * 2)
    for rows in (5, 3, 7, 6, 5):
        x = torch.randn(rows, 4)
        wrapped(torch.full((rows + 1, 4), torch.nan), torch.full((rows + 1, 4), torch.nan))
        torch.testing.assert_close(wrapped(x, x)[0], x.sum(0))
        torch.testing.assert_close(wrapped(x, x)[1], (x + x).sum(0))


def test_a_view_of_an_input_at_some_sizes_only_does_not_change_later():
    wrapped = warmed(lambda x: x if len(x) > 4 else x * 1)
    first = torch.randn(5, 4)
    kept = wrapped(first)
    wrapped(torch.randn(5, 4))
    assert torch.equal(kept, first)


def test_threads_that_return_their_inputs_do_not_mix_them():
    wrapped = warmed(lambda x: (x, x * 2))
    wrong: list[Any] = []

    def work(value: int) -> None:
        x = torch.full((5, 4), float(value))
        for _ in range(200):
            if not torch.equal(wrapped(x)[0], x):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("function", [
    lambda x: torch.cat([x, x.new_zeros(max(0, 4 - len(x)), 4)]),
    lambda x: x[:8] * 1,
])  # fmt: skip
def test_an_output_that_follows_its_axis_at_some_sizes_only_is_refused(function):
    wrapped = rows_of(function, rows=(1, 64))
    with pytest.raises(BucketedError, match="'output' has shape"):
        wrapped.warmup()
    with pytest.raises(CaptureError):
        wrapped(torch.randn(5, 4))


def test_a_maximum_over_padding_is_refused_though_the_example_is_positive():
    with pytest.raises(BucketedError, match="depend on padding"):
        warmed(lambda x: x.amax(0), torch.rand(3, 4) + 0.5)
    wrapped = warmed(lambda x: x.amax(0), torch.rand(3, 4) + 0.5, pad={"x": -torch.inf})
    x = -torch.rand(3, 4)
    assert torch.equal(wrapped(x), x.amax(0))


@pytest.mark.parametrize("function", [lambda x: x.flip(0), lambda x: x - x.mean(0)])
def test_mixing_is_seen_though_the_example_has_one_row(function):
    with pytest.raises(BucketedError, match="depend on padding"):
        warmed(function, torch.rand(1, 4), pad={"x": "repeat"})


def test_state_that_padding_would_write_is_refused():
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rows", torch.zeros(16, 4))

        def forward(self, x: Tensor) -> Tensor:
            self.rows[: len(x)] = x
            return x * 2

    with pytest.raises(BucketedError, match="'rows' is written in place"):
        warmed(Cache(), torch.randn(3, 4) + 9)


def write_slots(x, slots, cache):
    cache[slots] = x
    return x * 2


def test_an_input_that_padding_would_write_is_refused():
    example = torch.randn(3, 4) + 9, torch.tensor([3, 4, 5]), torch.ones(16, 4)
    axes = {"x": ("rows",), "slots": ("rows",)}
    with pytest.raises(BucketedError, match="'cache' is written in place"):
        warmed(write_slots, *example, axes=axes)
    wrapped = warmed(write_slots, *example, axes=axes, pad={"slots": "repeat", "x": "repeat"})
    cache = torch.zeros(16, 4)
    wrapped(*example[:2], cache)
    assert torch.equal(cache[3:6], example[0]) and not cache[:3].any() and not cache[6:].any()


def test_a_module_with_state_is_compared_from_the_same_state():
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    module = Counter()
    wrapped = warmed(module)
    x, calls = torch.randn(3, 4), int(module.calls)
    assert torch.equal(wrapped(x), x * (calls + 1))


def test_an_input_that_overlaps_what_is_written_is_refused():
    def step(x, state):
        state.add_(1)
        return x * 2

    wrapped = warmed(step, torch.randn(3, 4), torch.zeros(16, 4), axes={"x": ("rows",)})
    state = torch.zeros(16, 4)
    with pytest.raises(InputMismatch, match="'x' overlaps 'state' in memory"):
        wrapped(state[:3], state)
    assert not state.any()
    assert torch.equal(wrapped(state[:3].clone(), state), torch.zeros(3, 4)) and state.all()


def test_a_constant_that_changes_with_values_is_an_error():
    wrapped = warmed(lambda x: (x * 2, int(x.sum())), torch.zeros(3, 4))
    with pytest.raises(BucketedError, match=r"'output\[1\]' is 12, at the warmup 0"):
        wrapped(torch.ones(3, 4))


@pytest.mark.parametrize("function", [lambda x: x.cumsum(0), lambda x: x @ x.mT])
def test_parts_are_joined_only_if_they_equal_the_whole(function):
    with pytest.raises(BucketedError, match="overflow='split'"):
        warmed(function, overflow="split")


def test_parts_that_each_write_the_same_input_are_refused():
    def step(x, steps):
        steps.add_(1)
        return x * 2

    example = torch.randn(3, 4), torch.zeros(1)
    with pytest.raises(BucketedError, match="each part writes to 'steps'"):
        warmed(step, *example, axes={"x": ("rows",)}, overflow="split")


def test_parts_of_nested_outputs_are_joined_along_their_own_dimensions():
    def function(x, y):
        more = x.repeat_interleave(2, 0) + y.sum()
        return {"a": [x * 2, x.mT.contiguous()], "none": None, "text": "text", "more": more}

    wrapped = warmed(
        function, torch.randn(3, 4), torch.randn(5), axes={"x": ("rows",)}, overflow="split"
    )
    for rows in (9, 16, 17, 3):
        x, y = torch.randn(rows, 4), torch.randn(5)
        got, expected = wrapped(x, y), function(x, y)
        assert got.pop("text") == expected.pop("text")
        torch.testing.assert_close(got, expected)


def test_a_part_is_what_the_buckets_hold_with_the_other_axes():
    buckets = graphs.explicit(["rows", "length"], [(4, 2), (1, 8)])
    wrapped = graphs.bucketed(
        lambda x: x * 2, (torch.randn(3, 2),), buckets=buckets, backend="eager", overflow="split"
    )
    wrapped.warmup()
    x = torch.randn(3, 7)
    assert torch.equal(wrapped(x), x * 2)


@dataclasses.dataclass
class Batch:
    x: Tensor
    scale: Any = None


torch.export.register_dataclass(Batch)


def test_a_field_that_the_example_left_empty_is_not_dropped():
    def scaled(batch):
        return batch.x * (2 if batch.scale is None else batch.scale)

    wrapped = warmed(scaled, Batch(torch.randn(3, 4)), axes={"batch": ("rows",)})
    graph = graphs.capture(scaled, (Batch(torch.randn(3, 4)),), backend="eager")
    for call in (wrapped, graph.run):
        with pytest.raises(InputMismatch, match=r"'batch\.scale' is unknown"):
            call(Batch(torch.randn(3, 4), torch.randn(3, 4)))


def test_a_graph_that_differs_from_the_callable_does_not_serve(monkeypatch):
    run = graphs.CapturedGraph.run
    wrapped = rows_of(lambda x: x * 2)
    with monkeypatch.context() as patched:
        patched.setattr(
            graphs.CapturedGraph, "run", lambda self, *x: [y + 1 for y in run(self, *x)]
        )
        with pytest.raises(CaptureError, match="the graph is wrong"):
            wrapped.warmup()
    with pytest.raises(CaptureError, match="call warmup"):
        wrapped(torch.randn(3, 4))


# Calls that would fail, or fail without saying why


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_one_tensor_may_be_two_inputs(backend):
    wrapped = warmed(lambda x, y: x * y + 1, *[torch.randn(3, 4)] * 2, rows=[4], backend=backend)
    for rows in (4, 3, 4):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(wrapped(x, x), x * x + 1)


def test_an_example_in_another_layout_takes_any():
    wrapped = warmed(
        lambda x, y: x @ y, torch.randn(3, 4), torch.randn(4, 4).t(), axes={"x": ("rows",)}
    )
    x, y = torch.randn(3, 4), torch.randn(4, 4)
    for each in (y, y.t(), y[:1].expand(4, 4), y.repeat(2, 2)[::2, ::2]):
        torch.testing.assert_close(wrapped(x, each), x @ each)


@pytest.mark.parametrize("sizes", [(0, 4), [0, 4], (1, 4)])
def test_no_rows_are_served(sizes):
    wrapped = warmed(lambda x: x * 2, rows=sizes)
    for rows in (0, 3, 0):
        x = torch.randn(rows, 4)
        assert torch.equal(wrapped(x), x * 2)


def test_warmup_and_examples_may_be_in_inference_mode():
    with torch.inference_mode():
        wrapped = warmed(lambda x: x * 2)
        x = torch.randn(3, 4)
        assert torch.equal(wrapped(x), x * 2)
    assert torch.equal(wrapped(x), x * 2)


def test_without_a_check_results_may_depend_on_padding():
    wrapped = warmed(lambda x: x.sum(0) / len(x), check=False)
    x = torch.ones(3, 4)
    assert torch.equal(wrapped(x), torch.full((4,), 0.75))


def test_a_dimension_that_is_not_to_be_cut_is_not():
    wrapped = warmed(lambda x: x * 2, outputs={"output": (None, None)})
    assert wrapped(torch.ones(3, 4)).shape == (4, 4)


def test_a_warmup_that_a_budget_ended_serves_what_it_has(monkeypatch):
    wrapped = rows_of(lambda x: x * 2, order="smallest_first")
    wrapped._prepare()
    capturing = wrapped.managers[0]._capturing
    original = capturing.try_capture
    monkeypatch.setattr(
        capturing, "try_capture", lambda b, spent: original(b, "" if b["rows"] == 1 else "spent")
    )
    assert len(wrapped.warmup().captured) == 1
    x = torch.randn(1, 4)
    assert torch.equal(wrapped(x), x * 2)
    with pytest.raises(BucketOverflow):
        wrapped(torch.randn(3, 4))


def test_an_interrupted_warmup_continues():
    def stop(event):
        if event.status == "captured":
            raise KeyboardInterrupt

    wrapped = rows_of(lambda x: x * 2)
    with pytest.raises(KeyboardInterrupt):
        wrapped.warmup(stop)
    x = torch.randn(3, 4)
    assert torch.equal(wrapped(x), x * 2) and wrapped.pending == 3
    wrapped.warmup()
    assert torch.equal(wrapped(x), x * 2) and not wrapped.pending
    assert wrapped.hits[graphs.Bucket(rows=4)] == 1


def test_a_warmup_counts_no_hits():
    assert not any(warmed(lambda x: x * 2).hits.values())


def test_a_learned_size_that_the_callable_cannot_have_goes_to_the_ladder(tmp_path):
    def quads(x):
        return (x.unflatten(0, (-1, 4)) * 2).flatten(0, 1)

    options = {
        "axes": {"x": ("rows",)},
        "rows": (4, 16),
        "learn": tmp_path / "sizes.jsonl",
        "max_graphs": 6,
    }
    wrapped = warmed(quads, **options)
    x = torch.randn(7, 4)
    for _ in range(20):
        wrapped(x)
    wrapped.close()
    wrapped = rows_of(quads, **options)
    assert wrapped.warmup().failed
    assert torch.equal(wrapped(x), x * 2)


def test_late_captures_are_bounded():
    wrapped = warmed(lambda x: x * 2, overflow="compile", max_graphs=6)
    for rows in (20, 30):
        x = torch.randn(rows, 4)
        assert torch.equal(wrapped(x), x * 2)
    assert torch.equal(wrapped(x[:25]), x[:25] * 2)
    with pytest.raises(BucketOverflow, match="max_graphs=6"):
        wrapped(torch.randn(40, 4))


def test_what_the_caller_writes_to_the_example_is_not_seen():
    example = torch.zeros(3, dtype=torch.int64)
    table = torch.randn(5, 4)
    wrapped = graphs.bucketed(lambda ids: table[ids], rows=(1, 8), backend="eager")
    wrapped(example)
    example.fill_(99)
    wrapped.warmup()
    assert torch.equal(wrapped(torch.ones(3, dtype=torch.int64)), table[[1, 1, 1]])


def test_a_flag_may_come_by_position():
    def scaled(x, flag=False, y=None):
        return x * (2 if flag else 3) + y

    x = torch.randn(3, 4)
    wrapped = rows_of(scaled, discrete={"flag": (True, False)}, example=None)
    assert torch.equal(wrapped(x, True, x), x * 3)
    wrapped.warmup()
    assert torch.equal(wrapped(x, True, x), x * 3)
    assert torch.equal(wrapped(x, False, y=x), x * 4) and torch.equal(wrapped(x, y=x), x * 4)
    with pytest.raises(InputMismatch):
        wrapped(x, True, x, x)
    with pytest.raises(InputMismatch):
        wrapped(x, True, flag=True, y=x)


def test_a_sparse_input_is_named():
    with pytest.raises(BucketedError, match=r"'x' is torch\.sparse_coo; expected a strided"):
        warmed(lambda x: x * 2, torch.randn(3, 4).to_sparse())
    with pytest.raises(InputMismatch, match=r"'x' is torch\.sparse_coo"):
        warmed(lambda x: x * 2)(torch.randn(3, 4).to_sparse())


def test_a_function_of_the_sizes_with_other_names_is_one_line():
    wrapped = rows_of(lambda x: x[::2], outputs={"output": {0: lambda length: length // 2}})
    with pytest.raises(BucketedError, match="takes rows by keyword"):
        wrapped.warmup()


# A module like others


def test_copies_have_a_warmup_of_their_own():
    module = nn.Linear(4, 4)
    wrapped = warmed(module)
    other = copy.deepcopy(wrapped)
    assert type(other) is type(wrapped) and other.function is not module
    x = torch.randn(3, 4)
    with pytest.raises(CaptureError, match="call warmup"):
        other(x)
    other.warmup()
    with torch.no_grad():
        other.function.weight.zero_()
        torch.testing.assert_close(other(x), other.function(x))
        torch.testing.assert_close(wrapped(x), module(x))


def test_hooks_run():
    wrapped = warmed(nn.Linear(4, 4))
    handle = wrapped.register_forward_hook(lambda module, args, output: output * 0)
    assert not wrapped(torch.randn(3, 4)).any()
    handle.remove()
    assert wrapped(torch.randn(3, 4)).any()


def test_one_may_wrap_another():
    inner = warmed(lambda x: x * 2)
    wrapped = warmed(inner)
    x = torch.randn(3, 4)
    assert torch.equal(wrapped(x), x * 2)


def test_a_close_during_calls_breaks_no_later_call():
    wrapped = warmed(lambda x: x * 2)
    stop = threading.Event()
    others: list[BaseException] = []

    def work() -> None:
        x = torch.randn(3, 4)
        while not stop.is_set():
            try:
                assert torch.equal(wrapped(x), x * 2)
            except CaptureError:
                pass
            except BaseException as error:
                others.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        wrapped.close()
        wrapped.warmup()
    stop.set()
    for thread in threads:
        thread.join()
    x = torch.randn(3, 4)
    assert not others and torch.equal(wrapped(x), x * 2)


def test_a_call_within_its_own_run_is_an_error_and_a_close_there_is_not():
    # As by a handler of a signal: neither may wait for itself.
    within: list[Any] = [lambda: None]

    def function(x):
        within[0]()
        return x * 2

    wrapped = warmed(function)
    x = torch.randn(3, 4)
    within[0] = lambda: wrapped(x)
    with pytest.raises(CaptureError, match="called by its own run"):
        wrapped(x)
    within[0] = wrapped.close
    assert torch.equal(wrapped(x), x * 2)
    within[0] = lambda: None
    with pytest.raises(CaptureError, match="call warmup"):
        wrapped(x)
    wrapped.warmup()
    assert torch.equal(wrapped(x), x * 2)


# Random callables

_STEPS = {
    "scale": lambda x: x * 3,
    "relu": lambda x: x.relu(),
    "linear": lambda x: x @ torch.arange(16.0).view(4, 4),
    "softmax": lambda x: x.softmax(-1),
    "mean": lambda x: x - x.mean(1, keepdim=True),
    "cumsum": lambda x: x.cumsum(1),
    "flip": lambda x: x.flip(1),
    "last": lambda x: x + x[:, -1:],
    "first": lambda x: x + x[:, :1],
    "center": lambda x: x - x.mean(0),
    "norm": lambda x: x / (1 + x.norm(dim=1, keepdim=True)),
    "max": lambda x: x - x.amax(1, keepdim=True),
    "sort": lambda x: x.sort(1).values,
    "size": lambda x: x * x.shape[1],
}
_ENDS = {
    "same": lambda x: x,
    "sum": lambda x: x.sum(1),
    "amax": lambda x: x.amax((0, 1)),
    "flat": lambda x: x.flatten(1),
    "pair": lambda x: (x, {"pooled": x.sum(1), "width": 4}),
    "gram": lambda x: x @ x.mT,
    "view": lambda x: x.transpose(0, 1),
}


@given(
    st.lists(st.sampled_from([*_STEPS]), max_size=3),
    st.sampled_from([*_ENDS]),
    st.sampled_from([0, 1, "repeat"]),
    st.tuples(st.integers(1, 3), st.integers(1, 5)),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 8)), min_size=1, max_size=4),
)
def test_what_a_warmup_accepts_equals_the_callable(steps, end, pad, of_example, calls):
    def function(x):
        for step in steps:
            x = _STEPS[step](x)
        return _ENDS[end](x)

    wrapped = graphs.bucketed(
        function,
        (torch.randn(*of_example, 4),),
        axes={"x": ("batch", "length")},
        batch=(1, 4),
        length=(2, 8),
        pad={"x": pad},
        backend="eager",
    )
    try:
        wrapped.warmup()
    except BucketedError:
        return
    for sizes in calls:
        poison(wrapped)
        x = torch.randn(*sizes, 4)
        torch.testing.assert_close(wrapped(x), function(x))
