"""Writes a bundle: the graphs of a warm engine as data, and everything that they read."""

from __future__ import annotations

import contextlib
import ctypes
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiled_attn.bundle.executor import SOURCES
from compiled_attn.bundle.folder import WEIGHTS, Bundle, Manifest
from compiled_attn.engine.config import EngineConfig
from compiled_attn.engine.local import LocalExecutor
from compiled_attn.engine.sizing import work_of
from compiled_attn.errors import ConfigError
from compiled_attn.ops.cpu.build import path_of_part
from compiled_attn.ops.cpu.parts import bits_of
from compiled_attn.ops.paged_attention import load
from compiled_attn.step import TableLayout
from compiled_attn.text.plain_tokenizer import PlainTokenizer
from graphs import Bucket
from graphs.capture.inputs import byte_range, has_memory
from graphs.torch_internals.replay.recorder import NotReplayable, Recording
from graphs.torch_internals.replay.replay import Replay, Replays
from graphs.torch_internals.replay.saved import write_recordings

__all__ = ["write_bundle"]

_ALIGNMENT = 64
_SETTINGS = (
    "max_tokens_per_step", "max_seqs", "block_size", "kv_dtype", "max_graphs", "defrag_waste",
    "kernel", "weights", "strict", "watch_process", "same_bits",
)  # fmt: skip
"""Settings of the engine that a bundle keeps."""
_DECIDED = (
    "num_blocks", "kv_memory", "state_memory", "snapshot_every", "context", "buckets", "backend",
    "store", "async_scheduling", "warmup_journal",
)  # fmt: skip
"""Settings that have decided sizes and graphs already."""
_TEXTS = (
    "Hello, world!", " two  spaces\n\tand a tab", "na\u00efve caf\u00e9 \u4f60\u597d \U0001f600",
    "def f(x):\n    return x ** 2  # 3.14", "",
)  # fmt: skip


def write_bundle(
    executor: LocalExecutor, tokenizer: Any, folder: str | Path, model: str
) -> Manifest:
    """Writes the bundle of an executor after its warmup.

    Args:
        executor: on the CPU, with the native kernel and backend ``inductor``.
        tokenizer: of transformers.
        folder: is made; it appears once it is complete.
        model: name or path that the model was loaded from.

    Raises:
        ConfigError: the folder exists, or a graph cannot be replayed; the message says why.
        ModelError: the tokenizer cannot be written, see `PlainTokenizer.write`.
        OSError: the folder cannot be written.
    """
    target = Path(folder)
    replays = _replays_of(executor)
    if target.exists():
        raise ConfigError(
            f"expected a new folder for the bundle, got {target}, which exists: remove it, or name "
            "another one"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        PlainTokenizer.write(tokenizer, work)
        _check_tokenizer(tokenizer, PlainTokenizer.read(work))
        libraries = _write_graphs(executor, replays, work)
        made = Manifest.of_here(
            work,
            isa=load().isa,
            threads=torch.get_num_threads(),
            model=model,
            libraries=libraries,
            engine=_engine_of(executor),
        )
        made.write(work)
        for file in work.iterdir():
            file.chmod(0o644)  # whatever the umask: none that others can change is read
        Bundle(work).check()
        work.chmod(0o755)  # a bundle may be served by another user
        work.rename(target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return made


def _replays_of(executor: LocalExecutor) -> Replays:
    replays, why = executor.replays, ""
    if executor.kernel.name != "native" or not isinstance(executor.sizing.layout, TableLayout):
        why = f"the native kernel, got {executor.kernel.name}: leave --kernel at auto"
    elif replays is None:
        why = (
            f"backend inductor on the CPU, got {executor.config.backend_name}: leave --backend and "
            "--device out"
        )
    elif executor.adapters is not None:
        why = "a model without adapters, got slots for them: merge one into the model"
    elif others := _other_settings(executor.config):
        why = f"an engine without {', '.join(others)}, which it cannot have: leave them out"
    elif executor.graphs.report is None:
        why = "an engine after its warmup: call warmup()"
    if why or replays is None:
        raise ConfigError(f"a bundle needs {why}")
    return replays


def _other_settings(config: EngineConfig) -> list[str]:
    """Names of settings that were made and that a bundle does not keep."""
    return [
        each.name
        for each in fields(config)
        if each.name not in (*_SETTINGS, *_DECIDED) and getattr(config, each.name) != each.default
    ]


def _write_graphs(executor: LocalExecutor, replays: Replays, folder: Path) -> list[str]:
    """Writes recordings, weights and libraries; returns the names of the latter."""
    own = _Sources(executor)
    shapes, recordings, inputs = [], [], []
    for bucket in executor.sizing.buckets:
        batch = [*executor.module.layout.padding(bucket)]
        recording, args = _run(executor, replays, bucket, batch)
        shapes.append([[*each.shape] for each in batch])
        inputs.append([own.place(args[at], batch, bucket) for at in recording.inputs])
        recordings.append(recording)
    try:
        needed = write_recordings(recordings, replays.replayer.entry, folder)
    except NotReplayable as error:
        raise _cannot(f"{error}") from error
    ops = load().build
    assert ops is not None  # as it has a replayer
    named: dict[Path, str] = {}
    for library in (ops.library, *needed):
        named.setdefault(library.resolve(), f"library_{len(named)}.so")
    for library, name in named.items():
        shutil.copyfile(library, folder / name)
    bits = bits_of(executor.cache.dtype)
    if ops.is_divided and bits is not None:
        own_name = folder / named[ops.library.resolve()]
        shutil.copyfile(path_of_part(ops.library, bits), path_of_part(own_name, bits))
    order = [named[each.resolve()] for each in needed]
    weights = own.write(folder / WEIGHTS)
    sources = {"shapes": shapes, "inputs": inputs, "weights": weights, "libraries": order}
    (folder / SOURCES).write_text(json.dumps(sources), "utf-8")
    return [*named.values()]


def _run(
    executor: LocalExecutor, replays: Replays, bucket: Bucket, batch: Sequence[Tensor]
) -> tuple[Recording, Sequence[Any]]:
    """Replays a bucket on padding; returns its recording and the inputs of the compiled graph."""
    seen: list[tuple[Replay, list[Any]]] = []
    run: Callable[[], Any] = lambda: executor.graphs.run(bucket, *batch)  # noqa: E731
    replays.record(run)  # a bucket that shares a graph may not have run yet
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, replays, "on_run", None)
        replays.on_run = lambda replay, args: seen.append((replay, [*args]))
        run()
    if len(seen) != 1:
        reasons = "; ".join(replays.refused) or f"it runs {len(seen)} graphs"
        raise _cannot(f"the graph of {bucket} cannot be replayed: {reasons}")
    replay, args = seen[0]
    recording = replay.recording()
    if len(recording.outputs) != 1:
        raise _cannot(f"the graph of {bucket} returns {len(recording.outputs)} tensors")
    return recording, args


class _Sources:
    """Finds where the inputs of graphs come from, and writes the weights among them."""

    def __init__(self, executor: LocalExecutor) -> None:
        model, cache = executor.module.model, executor.cache
        self._cache = {each.data_ptr(): name for name, each in cache.named_buffers()}
        named = [*model.named_parameters(), *model.named_buffers()]
        self._weights = {each.data_ptr(): (name, each) for name, each in named if has_memory(each)}
        self._used: dict[str, Tensor] = {}

    def place(self, tensor: Tensor, batch: Sequence[Tensor], bucket: Bucket) -> tuple[str, Any]:
        """Returns the kind of source of an input, and its name or index."""
        address = tensor.data_ptr()
        for index, field in enumerate(batch):
            if field.data_ptr() == address:
                return "field", index
        if address in self._cache:
            return "cache", self._cache[address]
        if address not in self._weights:
            raise _cannot(
                f"the graph of {bucket} reads a tensor {[*tensor.shape]} that is neither a weight "
                "nor the cache"
            )
        name, weight = self._weights[address]
        self._used[name] = weight
        return "weight", name

    def write(self, path: Path) -> dict[str, tuple[int, int]]:
        """Writes the weights that were used; returns begin and length of each."""
        places = {}
        with path.open("wb") as file:
            for name, weight in self._used.items():
                begin, end = byte_range(weight)
                file.write(b"\0" * (-file.tell() % _ALIGNMENT))
                places[name] = file.tell(), end - begin
                file.write((ctypes.c_char * (end - begin)).from_address(begin))
            if not file.tell():
                raise _cannot("its graphs read no weight")
        return places


def _engine_of(executor: LocalExecutor) -> dict[str, Any]:
    sizing, module, cache = executor.sizing, executor.module, executor.cache
    layout, config, step = sizing.layout, executor.config, sizing.step
    assert isinstance(layout, TableLayout) and step is not None
    model, work = module.model, work_of(module.model)
    generation = getattr(model, "generation_config", None)
    names = "do_sample", "temperature", "top_p", "top_k"
    return {
        "context": sizing.context,
        "vocab": sizing.vocab,
        "block_size": sizing.block_size,
        "num_blocks": sizing.num_blocks,
        "width": layout.width,
        "buckets": [[bucket[axis] for axis in layout.axes] for bucket in sizing.buckets],
        "work": [work.linear, work.attention, work.head],
        "step": [step.tokens, step.why],
        "window": sizing.window,
        "near": [sizing.near_window, sizing.near_blocks],
        "eos": sorted(executor.eos),
        "config": {name: getattr(config, name) for name in _SETTINGS},
        "cache": [cache.num_kv_heads, cache.head_dim, cache.has_value],
        "cache_shapes": [[*shape] for shape in cache.shapes],
        "cache_near": cache.near,
        "cache_dtype": _name_of(cache.dtype),
        "states": sizing.states and [*astuple(sizing.states)],
        "state_shapes": cache.states
        and [
            [[each.kind, each.shape, _name_of(each.dtype)] for each in layer]
            for layer in cache.states.shapes
        ],
        "cache_bytes": sum(each.nbytes for each in cache.buffers()),
        "packed": [module.packed, module.quantised, module.widened, module.formats],
        "model_type": model.config.model_type,
        "generation": {name: getattr(generation, name, None) for name in names},
    }


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_tokenizer(given: Any, plain: PlainTokenizer) -> None:
    for text in _TEXTS:
        expected, got = given(text).input_ids, plain(text).input_ids
        if [*expected] != got:
            raise ConfigError(
                f"cannot make a bundle: its tokenizer returns {got[:8]} for {text!r}, expected "
                f"{expected[:8]}: serve this model without a bundle"
            )


def _cannot(why: str) -> ConfigError:
    return ConfigError(f"cannot make a bundle: {why}: serve this model without one")
