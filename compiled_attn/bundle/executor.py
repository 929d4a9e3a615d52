"""Computes the steps of an engine from a bundle, without transformers and inductor."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from compiled_attn.bundle.folder import WEIGHTS, Bundle, BundleError, BundleMisfit
from compiled_attn.cache import huge_pages
from compiled_attn.cache.kv_cache import KVShape, NearLayers, PagedKVCache
from compiled_attn.cache.state_cache import StateCache, StateShape
from compiled_attn.engine.cache_size import StateSize
from compiled_attn.engine.config import EngineConfig
from compiled_attn.engine.graph_store import store_of
from compiled_attn.engine.host_steps import HostSteps
from compiled_attn.engine.kernel import ChosenKernel
from compiled_attn.engine.local import LocalExecutor
from compiled_attn.engine.sizing import Sizing, StepSize
from compiled_attn.errors import NativeUnavailable
from compiled_attn.ops.cpu.isa import available_isas, request_permission
from compiled_attn.ops.paged_attention import NativeOps, load_library
from compiled_attn.step import ModelWork, TableLayout
from graphs.buckets.ladders import explicit
from graphs.capture.contract import Backend, CaptureSpec, Frozen, Job
from graphs.capture.memory import machine_bytes
from graphs.errors import CaptureError
from graphs.files import read_json
from graphs.torch_internals.replay.replay import Replay, Replays
from graphs.torch_internals.replay.saved import read_recordings

__all__ = ["SOURCES", "BundleExecutor", "BundledModel"]

SOURCES = "sources.json"
"""Where the inputs of the recordings come from, and the shapes of the inputs of each step."""


class BundleExecutor(LocalExecutor):
    """Replays the graphs of a bundle.

    Sets the number of torch's threads to that which the bundle was made with.

    Args:
        bundle: see `Bundle`.

    Raises:
        BundleMisfit: this system does not run its kernels.
        BundleError: the bundle does not fit together, or its cache does not fit the memory.
    """

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        with _fitting(bundle):
            self._read(bundle)

    def _read(self, bundle: Bundle) -> None:
        engine = bundle.manifest.engine
        own = bundle.manifest.libraries[0]
        ops = _load_ops(bundle, own)
        assert ops.build is not None
        # Another copy of the same library would register the ops again.
        loaded = {own: ops.build.library}
        layout = TableLayout(
            engine["num_blocks"],
            engine["block_size"],
            engine["width"],
            has_states=engine["states"] is not None,
        )
        self.sizing = _sizing_of(engine, layout)
        self.cache = _cache_of(bundle, engine)
        self.module = cast("Any", BundledModel(engine, self.cache, layout))
        self._replays = Replays(ops.replayer())  # type: ignore[arg-type]  # it has a library
        backend = _BundleBackend(bundle, self._replays, self.cache, loaded)
        self.config = EngineConfig(**engine["config"], backend=backend, store=False)
        self._store = store_of(backend, False)
        self.kernel = ChosenKernel("native", {"native": f"{ops.isa}, of the bundle"})
        self.eos = frozenset(engine["eos"])
        self.draft, self.others = None, []
        spec = CaptureSpec(backend, "step", strict=self.config.strict)
        self._make_graphs(HostSteps(self.module), spec, timed_runs=0)
        torch.set_num_threads(bundle.manifest.threads)

    def warmup(self, progress: Any = None) -> Any:
        """See `Executor.warmup`; waits until the weights are checked.

        Raises:
            BundleError: a byte of the weights differs.
        """
        report = super().warmup(progress)
        self._bundle.check()
        return report


@contextmanager
def _fitting(bundle: Bundle) -> Iterator[None]:
    """Turns what a manifest or a file may cause that has a right digest, but wrong contents."""
    try:
        yield
    except BundleError:
        raise
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
        raise BundleError(
            f"bundle {bundle.folder}: expected files that fit together, got others ({reason}): "
            "make it again"
        ) from error


def _load_ops(bundle: Bundle, library: str) -> NativeOps:
    isa, here = bundle.manifest.isa, available_isas()
    try:
        if isa not in here:
            raise NativeUnavailable(f"expected a processor with {isa}, got one with {here[0]}")
        # Tiles need it, whatever the manifest calls the library.
        with suppress(NativeUnavailable):
            request_permission(here[0])
        return load_library(bundle.path(library), isa)
    except NativeUnavailable as error:
        raise BundleMisfit(f"bundle {bundle.folder}: {error}") from error


class BundledModel(nn.Module):
    """Stands for the model of a bundle, whose steps are only replayed.

    Attributes:
        model: its device, configuration and generation configuration.
        packed, quantised, widened, formats: see `compiled_attn.models.hf.PagedCausalLM`.
    """

    def __init__(self, engine: Mapping[str, Any], cache: PagedKVCache, layout: TableLayout) -> None:
        super().__init__()
        self.cache, self.layout = cache, layout
        self.packed, self.quantised, self.widened, self.formats = engine["packed"]
        self.model: Any = SimpleNamespace(
            device=torch.device("cpu"),
            config=SimpleNamespace(model_type=engine["model_type"]),
            generation_config=SimpleNamespace(**engine["generation"]),
        )

    def forward(self, *inputs: Tensor) -> Tensor:
        """Raises RuntimeError: there is no code to run but the captured graphs."""
        raise RuntimeError("expected a captured step, got another one: a bundle has no other code")

    def check_unchanged(self) -> None:
        """Does nothing: nothing can change."""

    def remember(self) -> None:
        """Does nothing."""


class _BundleBackend(Backend):
    """Returns the graph of a bundle for the shapes of the examples, without running it."""

    name = "bundle"

    def __init__(
        self, bundle: Bundle, replays: Replays, cache: PagedKVCache, loaded: Mapping[str, Path]
    ) -> None:
        sources = read_json(bundle.path(SOURCES))
        needed = [loaded.get(name, bundle.path(name)) for name in sources["libraries"]]
        recordings = read_recordings(bundle.folder, needed)
        weights = _map_weights(bundle, sources["weights"])
        cached = dict(cache.named_buffers())
        self._replays = replays
        self._steps: dict[Any, _Step] = {}
        for shapes, recording, inputs in zip(
            sources["shapes"], recordings, sources["inputs"], strict=True
        ):
            if len(inputs) != len(recording.inputs):
                raise ValueError(f"{SOURCES} has {len(inputs)} inputs of {len(recording.inputs)}")
            tensors: list[Tensor | None] = []
            fields = []
            for at, (kind, name) in enumerate(inputs):
                if kind == "field" and 0 <= name < len(shapes):
                    fields.append((at, name))
                    tensors.append(None)
                else:
                    tensors.append({"weight": weights, "cache": cached}[kind][name])
            replay = Replay(recording._replace(inputs=range(len(inputs))), replays)
            self._steps[_key(shapes)] = _Step(replay, replays, tensors, fields)

    def capture(self, job: Job) -> Frozen:
        """See `Backend.capture`."""
        step = self._steps.get(_key([[*each.shape] for each in job.examples]))  # type: ignore[union-attr]
        if step is None:
            raise CaptureError(job.name, "the bundle has no graph of these shapes")
        self._replays.recorded += 1
        return Frozen(step, keep_alive=self._replays, is_loaded=True)


class _Step:
    def __init__(
        self,
        replay: Replay,
        replays: Replays,
        tensors: list[Tensor | None],
        fields: list[tuple[int, int]],
    ) -> None:
        self._replay, self._replays = replay, replays
        self._tensors, self._fields = tensors, fields

    def __call__(self, *inputs: Any) -> Tensor:
        tensors: list[Any] = [*self._tensors]  # other threads may run it at the same time
        for at, field in self._fields:
            tensors[at] = inputs[field]
        return self._replay.run(tensors, self._replays)[0]


def _key(shapes: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, shapes))


def _map_weights(bundle: Bundle, places: Mapping[str, list[int]]) -> dict[str, Tensor]:
    """Maps the weights, so that processes share them: bytes by name, from begin and length."""
    path = bundle.path(WEIGHTS)
    size = path.stat().st_size
    # Not shared, and never written: pages are those of the file.
    whole = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    for name, (begin, length) in places.items():
        if not (begin >= 0 < length <= size - begin):
            raise ValueError(f"{WEIGHTS} has {size:,} bytes, not {length:,} from {begin:,} {name}")
    return {name: whole[begin : begin + length] for name, (begin, length) in places.items()}


def _sizing_of(engine: Mapping[str, Any], layout: TableLayout) -> Sizing:
    buckets = explicit(layout.axes, [tuple(each) for each in engine["buckets"]])
    return Sizing(
        engine["context"],
        engine["vocab"],
        engine["block_size"],
        engine["num_blocks"],
        layout,
        buckets.with_cost(layout.cost(ModelWork(*engine["work"]))),
        step=StepSize(*engine["step"]),
        window=engine["window"],
        near_window=engine["near"][0],
        near_blocks=engine["near"][1],
        states=engine["states"] and StateSize(*engine["states"]),
    )


def _cache_of(bundle: Bundle, engine: Mapping[str, Any]) -> PagedKVCache:
    available, needed = machine_bytes(torch.device("cpu")), engine["cache_bytes"]
    if available is not None and needed > available:
        raise BundleError(
            f"bundle {bundle.folder}: expected {needed:,} bytes of memory for the KV cache, got "
            f"{available:,}: make the bundle with a smaller --kv-memory"
        )
    heads, dim, has_value = engine["cache"]
    shapes = [KVShape(*each) for each in engine["cache_shapes"]]
    near = engine["cache_near"]
    with huge_pages.touched_later():
        return PagedKVCache(
            len(shapes),
            engine["num_blocks"],
            engine["block_size"],
            heads,
            dim,
            dtype=getattr(torch, engine["cache_dtype"]),
            has_value=has_value,
            shapes=shapes,
            near=near and NearLayers(tuple(near[0]), near[1], near[2]),
            states=engine["states"] and _states_of(engine["state_shapes"], engine["states"]),
        )


def _states_of(shapes: Sequence[Sequence[Sequence[Any]]], size: Sequence[int]) -> StateCache:
    layers = [
        [StateShape(kind, tuple(sizes), getattr(torch, dtype)) for kind, sizes, dtype in layer]
        for layer in shapes
    ]
    return StateCache(layers, StateSize(*size).slots)
