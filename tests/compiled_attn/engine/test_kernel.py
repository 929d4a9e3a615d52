"""The engine on the native kernel: the tokens of plain generate, few graphs, no late compile."""

from __future__ import annotations

import re
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from compiled_attn.engine import ConfigError, Engine, EngineConfig, SamplingParams, local
from compiled_attn.engine import kernel as choice
from compiled_attn.engine.sampling import check_lengths
from compiled_attn.ops import NativeOps, packed_linear
from graphs import explicit
from tests.compiled_attn.engine.small import SIZES, greedy, plain, prompts_of, small_engine
from tests.compiled_attn.tiny import tiny_model

WHY = "expected a C++ compiler, found none: install g++"


pytestmark = pytest.mark.usefixtures("compiler")

_engine = partial(small_engine, kernel="native", num_blocks=128)


def _config(**changes) -> EngineConfig:
    return EngineConfig(**{**SIZES, "num_blocks": 128, "kernel": "native", **changes})


@pytest.mark.slow  # test_replay looks at the same of two layers
def test_captured_graphs_serve_without_a_compile_or_a_break():
    model, prompts = tiny_model("mistral", num_hidden_layers=1), prompts_of(4)
    engine = _engine(model, backend="inductor", max_graphs=2, weights="packed")
    assert greedy(engine, prompts, 6) == plain(model, prompts, 6)
    report = engine.report()
    assert (report.graphs, report.compiles_after_warmup, report.graph_breaks) == (2, 0, 0)
    assert report.compiled_graphs == 1
    assert {row["graph"] for row in report.buckets} == {"step[tokens requests]"}


def test_auto_is_native_where_the_model_is_supported():
    engine = Engine(tiny_model(), _config(kernel="auto"))
    kernel = engine.executor.kernel
    assert kernel.name == "native" and re.search("built|cached", kernel.notes["native"])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"backend": "onnxrt"}, "not of onnxrt"),
        ({"buckets": explicit(("tokens", "shared", "unique", "logits"), [(24, 8, 64, 4)])}, "axes"),
    ],
)
def test_what_is_not_supported_is_portable_by_auto_and_an_error_by_native(changes, match):
    match = "buckets over" if match == "axes" else match
    model = tiny_model()
    chosen = choice.chosen_kernel(model, _config(kernel="auto", **changes))
    assert chosen.name == "portable" and match in chosen.notes["native"]
    with pytest.raises(ConfigError, match=match):
        choice.chosen_kernel(model, _config(**changes))


def test_float64_is_portable_with_its_reason():
    engine = Engine(tiny_model().double(), _config(kernel="auto"))
    kernel = engine.executor.kernel
    assert kernel.name == "portable" and "float64" in kernel.notes["native"]


def test_a_kernel_that_does_not_build_is_an_error_if_strict_and_a_reason_if_not(monkeypatch):
    failed = NativeOps("compiled_attn", "reference", why_not_native=WHY)
    monkeypatch.setattr(choice, "load", lambda: failed)
    for kernel in ("auto", "native"):
        with pytest.raises(ConfigError, match="--kernel portable"):
            Engine(tiny_model(), _config(kernel=kernel))
    engine = Engine(tiny_model(), _config(kernel="auto", strict=False, max_graphs=4))
    assert engine.report().kernel == "sdpa"
    assert engine.report().kernel_notes == {"native": WHY}
    assert engine.report().fallbacks == 1
    with pytest.raises(ConfigError, match=r"^kernel 'native' cannot serve here: .*C\+\+ compiler"):
        Engine(tiny_model(), _config(strict=False))


def test_the_report_has_what_the_warmup_of_a_device_found(monkeypatch):
    notes: dict[str, str] = {}

    @contextmanager
    def measured(device):
        assert device.type == "cpu"
        yield notes
        notes["fa3"] = "serves 1 of 1 kinds of calls"

    monkeypatch.setattr(local, "measured_plans", measured)
    engine = Engine(tiny_model(), _config(max_graphs=2))
    assert "fa3" not in engine.report().kernel_notes
    engine.warmup()
    assert engine.report().kernel_notes["fa3"] == "serves 1 of 1 kinds of calls"


def test_buckets_of_the_native_kernel_need_it():
    buckets = explicit(("tokens", "requests"), [(24, 4)])
    with pytest.raises(ConfigError, match="the kernel is portable"):
        Engine(tiny_model(), _config(kernel="portable", buckets=buckets))


@pytest.mark.parametrize("kernel", ["auto", "native", "portable"])
def test_buckets_of_no_kernel_are_refused_with_the_axes_of_both(kernel):
    buckets = explicit(("tokens", "rows"), [(24, 4)])
    message = (
        r"over tokens, requests \(native\) or tokens, shared, unique, logits \(portable\), got "
        "tokens, rows"
    )
    with pytest.raises(ConfigError, match=message):
        Engine(tiny_model(), _config(kernel=kernel, buckets=buckets))


def test_a_request_without_a_bucket_is_refused_with_the_axes_of_the_kernel():
    engine = Engine(
        tiny_model(), _config(strict=False, buckets=explicit(("tokens", "requests"), [(8, 0)]))
    )
    with pytest.raises(ConfigError, match="add one with tokens >= 1 and requests >= 1"):
        check_lengths(engine.sizing, 3, 3)


def test_buckets_that_do_not_hold_the_largest_step_are_refused_if_strict():
    buckets = explicit(("tokens", "requests"), [(8, 4), (24, 3)])
    message = r"bucket of max_tokens_per_step=24 tokens and max_seqs=4 requests, got .*--no-strict"
    with pytest.raises(ConfigError, match=message):
        Engine(tiny_model(), _config(buckets=buckets))
    engine = _engine(buckets=buckets, strict=False)
    list(engine.generate([[n] * 5 for n in range(4)], SamplingParams(max_new_tokens=2)))
    assert engine.report().cut_steps == 1


@pytest.mark.parametrize(
    ("dtype", "weights", "backend"),
    [
        (torch.bfloat16, "packed", "aot_eager"),
        (torch.float32, "packed", "eager"),
        pytest.param(torch.float32, "packed", "aot_eager", marks=pytest.mark.slow),
        (torch.bfloat16, "plain", "eager"),
        (torch.float32, "plain", "eager"),
    ],
)
def test_packed_weights_generate_what_the_model_then_computes(dtype, weights, backend):
    model, prompts = tiny_model("llama", num_hidden_layers=1).to(dtype), prompts_of(5)
    expected = plain(model, prompts, 9)
    engine = _engine(model, weights=weights, backend=backend, max_graphs=2)
    results = greedy(engine, prompts, 9)
    assert ("weights" in engine.report().kernel_notes) is (weights == "packed")
    same = sum(
        a == b
        for text, other in zip(results, expected, strict=True)
        for a, b in zip(text, other, strict=False)
    )
    # In bfloat16 until rounding takes another token.
    assert same >= (0.5 if dtype is torch.bfloat16 else 1) * sum(map(len, expected))
    assert engine.report().compiles_after_warmup == 0


@pytest.mark.parametrize("weights", ["auto", "packed"])
def test_float32_of_16_bits_is_kept_so_unless_asked_otherwise(monkeypatch, weights):
    class Measured:
        def packing(self, weight: torch.Tensor) -> packed_linear.Packing | None:
            return "bf16-widen" if packed_linear.fits_bf16(weight) else "packed"

        def takes_onednn(self, weight: torch.Tensor) -> bool:
            return False

    monkeypatch.setattr(choice, "tuning", Measured)
    model = tiny_model("llama", num_hidden_layers=1).to(torch.bfloat16).float()
    prompts = prompts_of(3)
    expected = plain(model, prompts, 5)
    backend = "aot_eager" if weights == "auto" else "eager"
    engine = _engine(model, weights=weights, backend=backend, max_graphs=2)
    assert greedy(engine, prompts, 5) == expected
    received = engine.report().kernel_notes["weights"]
    assert received.endswith("in 16 bits, which hold them exactly") is (weights == "auto")
    assert model.dtype is torch.float32 and engine.report().compiles_after_warmup == 0
    if weights == "auto":
        with pytest.raises(ConfigError, match="stored float32 in 16 bits: load it again"):
            _engine(model, weights="packed", backend="eager")


@pytest.mark.parametrize("weights", ["int8", "w4a16"])
def test_rounded_weights_are_reported_and_reused_by_engines_of_the_same(weights):
    model = tiny_model("llama", num_hidden_layers=1)
    prompts = prompts_of(3)
    settings = {"backend": "eager", "max_graphs": 2}
    engine = _engine(model, weights=weights, backend="aot_eager", max_graphs=2)
    results = greedy(engine, prompts, 5)
    assert [len(tokens) for tokens in results] == [5] * 3
    assert engine.report().kernel_notes["weights"].endswith(f"weights in {weights}")
    assert engine.report().compiles_after_warmup == 0
    again = _engine(model, weights=weights, **settings)
    assert greedy(again, prompts, 5) == results
    for other in ("auto", "packed", "plain"):
        with pytest.raises(ConfigError, match=f"earlier engine made {weights}: load it again"):
            _engine(model, weights=other, **settings)


def test_packed_weights_are_not_made_int8():
    model = tiny_model("llama").to(torch.bfloat16)
    _engine(model, weights="packed", backend="eager")
    with pytest.raises(ConfigError, match="earlier engine made packed: load it again"):
        _engine(model, weights="int8", backend="eager")


@pytest.mark.parametrize(
    ("changes", "received"),
    [
        ({"weights": "packed", "kernel": "portable"}, "are for the native kernel"),
        ({"weights": "int8", "kernel": "portable"}, "'int8' are for the native kernel"),
        ({"weights": "int3"}, "expected weights of"),
    ],
)
def test_weights_that_cannot_be_are_refused(changes, received):
    with pytest.raises(ConfigError, match=received):
        _engine(tiny_model().to(torch.bfloat16), **changes)
