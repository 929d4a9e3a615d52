"""`graphs.bucketed` against the callables that it wraps."""

from __future__ import annotations

import dataclasses
import enum
import sys
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import graphs
from graphs.errors import BucketedError, BucketOverflow, CaptureError, InputMismatch


class Encoder(nn.Module):
    """Masked mean of embedded tokens, and the tokens' own vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.linear = nn.Linear(8, 8)
        self.config = {"width": 8}

    def forward(self, ids: Tensor, mask: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        hidden = self.linear(self.embed(ids)) * scale
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        pooled = (hidden * weight).sum(1) / weight.sum(1).clamp_min(1)
        return {"hidden": hidden, "pooled": [pooled], "width": 8}


def encoder_inputs(batch: int = 3, length: int = 5) -> dict[str, Any]:
    mask = torch.ones(batch, length, dtype=torch.bool)
    mask[0, length // 2 + 1 :] = False
    return {"ids": torch.randint(0, 50, (batch, length)), "mask": mask}


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    return Encoder().eval()


@pytest.fixture(scope="module")
def wrapped(encoder):
    bucketed = graphs.bucketed(encoder, encoder_inputs(), batch=(1, 8), length=(4, 32))
    report = bucketed.warmup()
    assert len(report.captured) == 16 and report.compiles <= 2
    return bucketed


@given(st.integers(1, 8), st.integers(1, 32))
def test_any_size_equals_the_module_and_compiles_nothing(wrapped, encoder, batch, length):
    inputs = encoder_inputs(batch, length)
    with graphs.no_compile(), torch.no_grad():
        torch.testing.assert_close(wrapped(**inputs), encoder(**inputs))


def test_a_call_after_a_larger_one_sees_no_rest_of_it(wrapped, encoder):
    for sizes in ((8, 32), (5, 17), (8, 32), (7, 31), (5, 32)):
        inputs = encoder_inputs(*sizes)
        with torch.no_grad():
            torch.testing.assert_close(wrapped(**inputs), encoder(**inputs))


def test_outputs_stay_when_the_next_call_runs(wrapped):
    first = wrapped(**encoder_inputs(3, 9))
    before = first["hidden"].clone()
    wrapped(**encoder_inputs(3, 9))
    assert torch.equal(first["hidden"], before)


def test_inputs_come_by_position_in_other_layouts_and_under_inference_mode(wrapped, encoder):
    inputs = encoder_inputs(4, 16)
    expected = encoder(**inputs)
    across = inputs["ids"].t().contiguous().t()
    torch.testing.assert_close(wrapped(across, inputs["mask"]), expected)
    with torch.inference_mode():
        torch.testing.assert_close(wrapped(**inputs), expected)
        fresh = encoder_inputs(4, 16)
        torch.testing.assert_close(wrapped(**fresh), encoder(**fresh))


def test_threads_do_not_mix_their_inputs(wrapped, encoder):
    calls = [encoder_inputs(batch, 9 + batch) for batch in range(1, 9)] * 4
    results: dict[int, Any] = {}

    def work(start: int) -> None:
        for index in range(start, len(calls), 4):
            results[index] = wrapped(**calls[index])

    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.no_grad():
        for index, inputs in enumerate(calls):
            torch.testing.assert_close(results[index], encoder(**inputs))


def test_it_takes_the_place_of_the_module(wrapped, encoder):
    assert wrapped.config is encoder.config and wrapped.embed is encoder.embed
    parent = nn.Module()
    parent.encoder = encoder
    parent.encoder = wrapped
    assert parent.encoder is wrapped and "linear.weight" in encoder.state_dict()
    with pytest.raises(AttributeError, match="nothing"):
        wrapped.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"mask": torch.ones(3, 6, dtype=torch.bool)},
            "axis 'length' is 5 in dimension 1 of 'ids'",
        ),
        ({"ids": torch.ones(3, 5)}, "tensor 'ids' has dtype float32, captured int64"),
        ({"ids": torch.ones(3, dtype=torch.int64)}, "'ids' has 1 dimensions; expected 'length'"),
        ({"ids": 4}, "'ids' has 0 dimensions"),
        ({"scale": 2.0}, "'scale' is unknown"),
    ],
)
def test_a_wrong_call_is_named_and_nothing_runs(wrapped, change, text):
    before = dict(wrapped.hits)
    with pytest.raises(InputMismatch, match=text):
        wrapped(**encoder_inputs() | change)
    assert wrapped.hits == before


def test_what_is_too_large_names_the_sizes(wrapped):
    with pytest.raises(BucketOverflow, match="batch=9 length=5 fits no bucket"):
        wrapped(**encoder_inputs(9, 5))


def rows_of(function, **options):
    example = options.pop("example", (torch.randn(3, 4),))
    return graphs.bucketed(function, example, backend="eager", **{"rows": (1, 4), **options})


@pytest.mark.parametrize("overflow", ["eager", "split", "compile"])
def test_larger_inputs_are_served_and_counted(overflow):
    def double(x, shift):
        return {"y": x * 2 + shift, "name": "double"}

    example = torch.randn(3, 4), torch.randn(4)
    wrapped = rows_of(double, example=example, axes={"x": ("rows",)}, overflow=overflow)
    wrapped.warmup()
    x, shift = torch.randn(11, 4), torch.randn(4)
    result = wrapped(x, shift)
    assert torch.equal(result["y"], x * 2 + shift) and result["name"] == "double"
    assert wrapped.fallbacks == 1
    wrapped(x[:4], shift)
    assert wrapped.fallbacks == 1


def test_results_that_cannot_be_joined_are_refused_before_the_capture():
    wrapped = rows_of(lambda x: (x, x[0]), overflow="split")
    with pytest.raises(BucketedError, match=r"output 'output\[1\]' does not follow 'rows'"):
        wrapped.warmup()
    assert wrapped.report is None


class Mode(enum.Enum):
    SUM = 1
    PRODUCT = 2


def test_flags_and_enums_have_graphs_of_their_own():
    def combine(x, y, mode=Mode.SUM, both=False):
        z = x + y if mode is Mode.SUM else x * y
        return (z, x) if both else z

    inputs = torch.randn(3, 4), torch.randn(3, 4)
    discrete = {"mode": tuple(Mode), "both": (False, True)}
    wrapped = rows_of(combine, example=inputs, discrete=discrete)
    assert len(wrapped.warmup().captured) == 12
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    for mode in Mode:
        assert torch.equal(wrapped(x, y, mode=mode), combine(x, y, mode))
        assert torch.equal(wrapped(x, y, mode=mode, both=True)[0], combine(x, y, mode))
    assert torch.equal(wrapped(x, y), x + y)
    with pytest.raises(InputMismatch, match="'both' is 1; expected one of False, True"):
        wrapped(x, y, both=1)
    with pytest.raises(InputMismatch, match="'mode' is"):
        wrapped(x, y, mode=[])


def test_an_output_that_is_an_input_does_not_change_later():
    wrapped = rows_of(lambda x: (x, x * 2))
    wrapped.warmup()
    first = torch.randn(3, 4)
    kept = wrapped(first)[0]
    wrapped(torch.randn(3, 4))
    assert torch.equal(kept, first)


@pytest.mark.parametrize(("pad", "expected"), [(0, 6), ("repeat", 6 + 5 * 3), (7, 6 + 7 * 5)])
def test_padding_has_the_values_that_were_asked_for(pad, expected):
    def total(x):  # depends on padding on purpose
        return x, x.sum()

    wrapped = rows_of(
        total,
        example=(torch.ones(3, dtype=torch.int64),),
        rows=[8],
        pad={"x": pad},
        check=False,
    )
    variant_inputs = torch.tensor([1, 2, 3])
    wrapped._prepare()
    wrapped.managers[0].warmup()
    x, summed = wrapped(variant_inputs)
    assert x.tolist() == [1, 2, 3] and summed == expected
    x, summed = wrapped(variant_inputs + 1)  # the padding follows, or stays
    assert summed == expected + 3 + (5 if pad == "repeat" else 0)


class Mixing(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.convolution = nn.Sequential(
            nn.Conv1d(4, 4, 3, padding=1), nn.Conv1d(4, 4, 3, padding=1)
        )
        self.batch_norm = nn.BatchNorm1d(4)
        self.kind = kind

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        before = self.before(x)
        if self.kind == "mean":
            return before, before - before.mean(1, keepdim=True)
        return before, getattr(self, self.kind)(before.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize(
    ("kind", "module"),
    [
        ("convolution", r"'convolution\.0' \(Conv1d\)"),
        ("batch_norm", r"'batch_norm' \(BatchNorm1d\)"),
        ("mean", "Mixing itself"),
    ],
)
def test_a_module_that_mixes_padding_in_is_named(kind, module):
    wrapped = graphs.bucketed(
        Mixing(kind).train(kind == "batch_norm"),
        (torch.randn(3, 5, 4),),
        batch=(2, 4),
        length=(4, 16),
        backend="eager",
    )
    with pytest.raises(BucketedError, match=rf"depend on padding: output 'output\[1\]'.*{module}"):
        wrapped.warmup()
    assert wrapped.report is None


def test_an_exact_axis_serves_the_sizes_of_its_buckets_alone():
    module = Mixing("convolution").eval()
    example = (torch.randn(3, 8, 4),)
    wrapped = graphs.bucketed(
        module, example, batch=(1, 4), length=[8, 12], exact=["length"], backend="eager"
    )
    wrapped.warmup()
    x = torch.randn(3, 12, 4)
    with torch.no_grad():
        torch.testing.assert_close(wrapped(x), module(x))
    with pytest.raises(BucketOverflow, match=r"'length' is exact, with the sizes \[8, 12\]"):
        wrapped(x[:, :11])


@dataclasses.dataclass
class Unregistered:
    x: Tensor


def identity(x):
    return x * 1


@pytest.mark.parametrize(
    ("example", "options", "text"),
    [
        ((torch.ones(3, 4),), {"axes": {"y": ("rows",)}}, "no input 'y'; expected one of x"),
        ((torch.ones(3, 4),), {"axes": {"x": ("row",)}}, "dimension 0 of 'x' follows 'row'"),
        ((torch.ones(3, 4),), {"axes": {"x": {2: "rows"}}}, "'x' has no dimension 2; it has 2"),
        ((torch.ones(3, 4),), {"axes": {"x": "rows"}}, "expected one name or None per dimension"),
        ((torch.ones(3, 4),), {"axes": {"x": (None,)}}, "no input follows 'rows'"),
        ((torch.ones(3, 4),), {"axes": {"x": ("rows", "rows")}}, "'rows' is 3 in dimension 0"),
        ((torch.tensor(3.0),), {}, "no input has the 1 dimensions rows"),
        (None, {}, "expected an example, got none"),
        ((torch.ones(3, 4),), {"pad": {"y": 1}}, "no padded input 'y'; expected one of x"),
        ((torch.ones(3, dtype=torch.int64),), {"pad": {"x": 0.5}}, "int64 and cannot hold 0.5"),
        ((torch.ones(3).half(),), {"pad": {"x": 1e6}}, "float16 and cannot hold 1000000.0"),
        ((torch.ones(0, 4),), {}, "size 0 on axis 'rows'; expected at least 1"),
        ((torch.ones(3, 4),), {"outputs": {"y": ("rows",)}}, "no 'y'; expected one of output"),
        (
            (torch.ones(3, 4),),
            {"outputs": {"output": (None, "rows")}},
            "is 4 at rows=1; expected 1",
        ),
        ((torch.ones(3, 4),), {"outputs": {"output": {4: "rows"}}}, "'output' has no dimension 4"),
    ],
)
def test_bad_input_is_one_line_and_captures_nothing(example, options, text):
    wrapped = rows_of(identity, example=example, **options)
    with pytest.raises(BucketedError, match=text) as caught:
        wrapped.warmup()
    assert "\n" not in str(caught.value) and wrapped.report is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rows": (4, 1)}, "with 0 <= min <= max"),
        ({"rows": ()}, r"expected \(min, max\)"),
        ({"rows": 4}, r"expected \(min, max\)"),
        ({"rows": (1, 2, 8)}, r"expected \(min, max\)"),
        ({"rows": torch.export.Dim("rows")}, "has no maximum"),
        ({"mode": "reduce-overhead"}, "if 'mode' is meant as an option, there is none"),
        ({"exact": ["columns"]}, "no axis 'columns'; expected one of rows"),
        ({"split": "columns"}, "no axis 'columns'"),
        ({"overflow": "ignore"}, "overflow is 'ignore'"),
        ({"training": True}, "no gradients"),
        ({"discrete": {"x": ()}}, "'x' has no values"),
        ({"buckets": graphs.explicit(["rows"], [4])}, "got both"),
    ],
)
def test_bad_options_are_refused_at_once(options, text):
    with pytest.raises(BucketedError, match=text):
        rows_of(identity, **options)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda x: x[::2], "is 1 at rows=1, 1 at rows=2, 2 at rows=4, no multiple of 'rows'"),
        (lambda x: x[:2], "no multiple of 'rows'"),
        (lambda x: x.new_zeros(len(x) + 1), "no multiple of 'rows'"),
        (lambda x: x.add_(1), "'x' is written in place"),
        (lambda x: [x] * len(x), "another structure at rows=2"),
        (lambda x: len(x), "'output' is a constant that changes"),
        (lambda x: x.squeeze(0), "another number of dimensions"),
        (lambda x: Unregistered(x), "'output' is a Unregistered"),
        (lambda x: x[torch.randperm(len(x))], "depend on padding"),
        (lambda x: 1 / 0, "it fails at rows=1: ZeroDivisionError"),
    ],
)
def test_outputs_that_follow_no_axis_are_refused(function, text):
    with pytest.raises(BucketedError, match=text):
        rows_of(function).warmup()


@pytest.mark.parametrize(
    "function", [lambda x: x.flatten(), lambda x: (x.T, x.repeat_interleave(3, 0)), identity]
)
def test_multiples_of_an_axis_are_cut_anywhere(function):
    wrapped = rows_of(function)
    wrapped.warmup()
    for rows in (1, 3, 4):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(wrapped(x), function(x), rtol=0, atol=0)


def test_a_function_says_how_an_output_follows():
    def halve(x):
        return x[:, ::2]

    example = (torch.randn(3, 5),)
    options: dict[str, Any] = {"batch": (1, 4), "length": (3, 16), "backend": "eager"}
    with pytest.raises(BucketedError, match="dimension 1 of output 'output' is 2 at length=3"):
        graphs.bucketed(halve, example, **options).warmup()
    size = {"output": {1: lambda length, **_: (length + 1) // 2}}
    wrapped = graphs.bucketed(halve, example, outputs=size, **options)
    wrapped.warmup()
    for length in (1, 8, 9):
        x = torch.randn(3, length)
        assert torch.equal(wrapped(x), halve(x))


def test_two_axes_in_one_dimension_are_ambiguous():
    with pytest.raises(BucketedError, match="dimension 0 of output 'output' follows batch and"):
        graphs.bucketed(
            lambda x: x.flatten(0, 1),
            (torch.randn(3, 5, 4),),
            batch=(1, 4),
            length=(4, 16),
            backend="eager",
        ).warmup()


def test_gradients_are_refused_by_name():
    wrapped = rows_of(identity)
    wrapped.warmup()
    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(InputMismatch, match="'x' requires a gradient"):
        wrapped(x)
    with torch.no_grad():
        assert torch.equal(wrapped(x), x)


def test_the_first_call_is_the_example():
    wrapped = graphs.bucketed(identity, rows=(1, 4), backend="eager")
    x = torch.randn(3, 4)
    assert torch.equal(wrapped(x), x) and wrapped.fallbacks == 1
    wrapped.warmup()
    assert torch.equal(wrapped(x[:2]), x[:2]) and wrapped.fallbacks == 1


def test_a_call_before_the_warmup_says_so():
    wrapped = rows_of(identity)
    with pytest.raises(CaptureError, match="call warmup"):
        wrapped(torch.randn(3, 4))


def test_axes_are_dims_of_torch_export_and_entries_for_containers():
    def step(x, cache):
        return x + cache["k"][0] + cache["v"]

    batch = torch.export.Dim("batch", min=1, max=4)
    example = {"x": torch.randn(3, 4), "cache": {"k": [torch.randn(3, 4)], "v": torch.randn(3, 4)}}
    axes = {"x": {0: batch}, "cache": {0: batch}}
    wrapped = graphs.bucketed(step, example, axes=axes, batch=batch, backend="eager")
    wrapped.warmup()
    x = torch.randn(2, 4)
    assert torch.equal(wrapped(x, cache={"v": x, "k": [x]}), x * 3)


def test_several_modules_share_a_warmup():
    one, two = rows_of(identity, name="one"), rows_of(lambda x: x * 2, name="two")
    report = graphs.WarmupGroup(one, two).warmup()
    assert len(report.captured) == 6 and not one.pending + two.pending
    x = torch.randn(3, 4)
    assert torch.equal(two(one(x)), x * 2)
    one.close()
    with pytest.raises(CaptureError):
        one(x)
    one.warmup()
    assert torch.equal(one(x), x)


def test_several_modules_share_one_budget(monkeypatch):
    grown = iter(range(0, 10_000, 100))
    module = sys.modules["graphs.capture.capture"]
    monkeypatch.setattr(module, "bytes_in_use", lambda devices: next(grown))
    one, two = rows_of(identity), rows_of(lambda x: x * 2)
    report = graphs.WarmupGroup(one, two, budget_bytes=450).warmup()
    assert len(report.captured) == 5 and len(report.skipped) == 1
    assert "budget of" in report.skipped[0].error
    with pytest.raises(ValueError, match="budget_bytes is -1"):
        graphs.WarmupGroup(one, budget_bytes=-1)


def test_sizes_of_calls_are_learned_for_the_next_start(tmp_path):
    file = tmp_path / "sizes.jsonl"
    options = {"rows": (1, 64), "learn": file, "max_graphs": 8}
    first = rows_of(identity, **options)
    assert len(first.warmup().captured) == 7
    for _ in range(9):
        first(torch.randn(37, 4))
    first.close()
    second = rows_of(identity, **options)
    second.warmup()
    x = torch.randn(37, 4)
    assert torch.equal(second(x), x)
    assert second.hits[graphs.Bucket(rows=37)] == 1
    assert torch.equal(second(x.repeat(2, 1)[:64]), x.repeat(2, 1)[:64])  # the ladder stays
    with pytest.raises(BucketedError, match="learn: expected max_graphs of at least the 7"):
        rows_of(identity, **options | {"max_graphs": 3})
    with pytest.raises(graphs.BucketFileError, match="expected sizes of columns"):
        graphs.bucketed(identity, (x,), columns=(1, 4), learn=file)


def test_a_fixed_size_that_equals_the_examples_batch_is_no_axis():
    wrapped = rows_of(lambda x: x * 2, example=(torch.randn(4, 4),), rows=(1, 8))
    wrapped.warmup()
    x = torch.randn(3, 4)
    assert torch.equal(wrapped(x), x * 2)


def test_the_largest_k_over_padding_is_refused():
    wrapped = graphs.bucketed(
        lambda x: x.topk(2, 1).values,
        (torch.rand(3, 7, 4),),
        batch=(1, 4),
        length=(8, 32),
        backend="eager",
    )
    with pytest.raises(BucketedError, match="depend on padding"):
        wrapped.warmup()


def test_a_stale_graph_names_parts_as_the_module_does():
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval()
    wrapped = graphs.bucketed(module, (torch.randn(3, 4),), rows=(2, 4), backend="aot_eager")
    wrapped.warmup()
    module.train()
    with pytest.raises(graphs.StaleGraph, match="training") as caught:
        wrapped(torch.randn(3, 4))
    assert "call" not in caught.value.detail.partition(":")[2]
    assert "function" not in caught.value.detail.replace("torch function", "")
