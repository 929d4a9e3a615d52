"""No feature can fail a capture: each is broken in four ways, and graphs still equal eager."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event
from typing import Any

import pytest
import torch
from torch import nn

import graphs
from graphs import CaptureError, capture
from graphs.store import ArtifactStore, StoredInductor
from graphs.torch_internals import headers, regions, vectors
from graphs.torch_internals.catalog import FEATURES
from graphs.torch_internals.features import Feature, Patch, with_features
from graphs.torch_internals.regions import Region
from graphs.torch_internals.replay import replay
from tests.graphs.torch_internals.replay.replayer_double import ReplayerDouble

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_gradients")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu() + 1


class Stack(nn.Module):
    """Layers as regions, with a simpler variant that has none."""

    def __init__(self, key: int | None = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self._key = key
        self._region = Region(lambda layer, x: layer(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self._region(self._key, layer, x)
        return x


def _raise(*_: Any, **__: Any) -> None:
    raise RuntimeError("this torch differs")


_GARBAGE = object()


def _private(path: str) -> dict[str, Any]:
    """The four breaks of a private name that torch itself does not need."""
    return {
        "gone": lambda patch: patch.delattr(path),
        "signature": lambda patch: patch.setattr(path, lambda *, other: None),
        "garbage": lambda patch: patch.setattr(path, lambda *_, **__: _GARBAGE),
        "raises": lambda patch: patch.setattr(path, _raise),
    }


def _patched(module: Any, garbage: object = _GARBAGE) -> dict[str, Any]:
    """The four breaks of a feature that replaces attributes of torch while it captures."""
    make = module._replacements

    def of(value: Any) -> Any:
        return lambda patch: patch.setattr(
            module,
            "_replacements",
            lambda: [Patch(owner, name, staticmethod(value)) for owner, name, _ in make()],
        )

    return {
        "gone": lambda patch: patch.setattr(module, "_replacements", _raise),
        "signature": of(lambda *, other: None),
        "garbage": of(lambda *_, **__: garbage),
        "raises": of(_raise),
    }


def _settings() -> dict[str, Any]:
    def value(setting: Any) -> Any:
        return lambda patch: patch.setattr(vectors, "_SETTING", setting)

    return {
        "gone": value("cpp.no_such_setting"),
        "signature": value(("cpp", "vec_isa_ok")),
        "garbage": lambda patch: patch.setattr(vectors, "_override", lambda _: object()),
        "raises": lambda patch: patch.setattr(vectors, "_override", _raise),
    }


def _headers() -> dict[str, Any]:
    def broken(name: str, value: Any) -> Any:
        def patch(patch: Any) -> None:
            patch.setattr(headers, "_started", [])
            patch.setattr(headers, name, value)

        return patch

    return {
        "gone": broken("_probe_vectors", _raise),
        "signature": broken("_probe_vectors", lambda *, other: None),
        "garbage": broken("_KERNEL", _GARBAGE),
        "raises": broken("_precompile", _raise),
    }


BREAKS = {
    "direct_call": _private("torch._dynamo.eval_frame._debug_get_cache_entry_list"),
    "headers_ahead": _headers(),
    "native_checks": _private("torch._C._dynamo.guards.TensorGuards"),
    "native_checks of settings": _private("torch._C._dynamo.guards.GlobalStateGuard"),
    "region_reuse": _private("torch.compiler.nested_compile_region"),
    "region_reuse of effects": _patched(regions, garbage=""),  # an object is truthy
    "regions": _private("torch.compiler.nested_compile_region"),
    "replay": _patched(replay),
    "trusted_vectors": _settings(),
}
INDUCTOR = ("replay", "trusted_vectors")


def test_every_feature_is_broken():
    assert {name.split()[0] for name in BREAKS} == {feature.name for feature in FEATURES}


@pytest.mark.parametrize("way", ["gone", "signature", "garbage", "raises"])
@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_feature_fails_no_capture(name, way, monkeypatch, tmp_path, caplog):
    feature = {each.name: each for each in FEATURES}[name.split()[0]]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for each in FEATURES:
        each._why_off = None  # probed below, by the torch that is broken
    BREAKS[name][way](monkeypatch)
    found_by_probe = bool(feature.why_off)
    backend = "eager" if feature.name == "native_checks" else "aot_eager"
    options: dict[str, Any] = {"backend": backend}
    if feature.name in INDUCTOR:
        options = {"backend": "inductor", "replays": replay.Replays(ReplayerDouble())}
    elif feature.name == "headers_ahead":
        options = {"backend": StoredInductor(ArtifactStore(tmp_path))}
    module, x = Stack(), torch.randn(3, 8)
    expected = module(x)
    graph = capture(module, [x], **options)
    for started in headers._started:
        started.thread.join()
    other = torch.randn(3, 8)
    torch.testing.assert_close(graph.run(x), expected)
    torch.testing.assert_close(graph.run(other), module(other))
    monkeypatch.undo()
    state = {each.name: each for each in graphs.torch_features()}[feature.name]
    assert not state.is_on and state.why_off
    lines = [each for each in caplog.messages if f"feature {feature.name} is switched off" in each]
    assert len(lines) == (not found_by_probe)


def test_no_patch_outlives_a_capture():
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache

    before = [vars(AsyncCompile).copy(), vars(PyCodeCache).copy()]
    capture(Stack(), [torch.ones(3, 8)], replays=replay.Replays(ReplayerDouble()))
    with pytest.raises(CaptureError):
        capture(lambda x: torch._dynamo.graph_break() or x, [torch.ones(3)])
    for cls, own in zip((AsyncCompile, PyCodeCache), before, strict=True):
        changed = {name for name, value in vars(cls).items() if own.get(name) is not value}
        assert not {name for name in changed if callable(getattr(cls, name))}


class Faulty:
    """A feature whose code fails a capture while it is on."""

    def __init__(self, name: str, files: tuple[str, ...] = (__file__,)) -> None:
        self.feature = Feature(
            name, gain="", fallback="", versions="", files=files, probe=lambda: ""
        )

    def make(self) -> str:
        if self.feature.is_on:
            raise ValueError("of the feature")
        return "made"


@pytest.fixture
def faulty():
    from graphs.torch_internals import features

    made = Faulty("faulty")
    yield made
    del features._features["faulty"]


def test_a_feature_that_fails_is_switched_off_with_one_line(faulty, caplog):
    with caplog.at_level(logging.WARNING):
        assert [with_features(faulty.make) for _ in range(3)] == ["made"] * 3
    assert [each for each in caplog.messages if "faulty is switched off" in each] == [
        "torch feature faulty is switched off: a capture failed with it: ValueError: of the "
        "feature. "
    ]
    assert faulty.feature.state.why_off


def test_an_error_that_does_not_come_again_switches_no_feature_off(faulty):
    errors = [OSError("too many open files")]

    def make():
        if errors:
            raise errors.pop()
        return "made"

    assert with_features(make) == "made" and faulty.feature.is_on


def test_a_capture_that_fails_without_features_too_switches_none_off(faulty):
    def make():
        raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user"):
        with_features(make)
    assert faulty.feature.is_on


def test_a_feature_stays_suspended_until_the_last_thread_is_done(faulty):
    feature, calls = faulty.feature, []
    feature.suspend, feature.resume = (lambda: calls.append("off")), (lambda: calls.append("on"))
    both, failed = Barrier(2), Event()

    def fail():
        if not feature.is_on:
            both.wait(10)
        raise ValueError("of the user")

    def work():
        faulty.make()
        both.wait(10)
        failed.wait(10)
        return [*calls]

    with ThreadPoolExecutor() as pool:
        other = pool.submit(with_features, work)
        with pytest.raises(ValueError, match="of the user"):
            with_features(fail, keep_all=True)
        failed.set()
        assert other.result() == ["off", "off"]


def test_a_probe_that_fails_is_the_reason():
    feature = Feature("x", gain="", fallback="", versions="", files=(), probe=lambda: 1 / 0)  # type: ignore[arg-type]
    from graphs.torch_internals import features

    del features._features["x"]
    assert not feature.is_on
    assert feature.why_off == "its probe fails: ZeroDivisionError: division by zero"
