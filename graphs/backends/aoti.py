"""`torch.export` and an AOTInductor package, which loads in milliseconds without a compiler.

Parameters and buffers are inputs of the package, never constants: the caller sees what the graph
writes to them, the graph reads what the caller changes, and a package holds only code.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphs.backends.inductor import InductorBackend
from graphs.capture.contract import Backend, Frozen, Job
from graphs.capture.export_state import (
    Stateless,
    bind_state,
    constant_of,
    constants_of_others,
    needs_gradients,
    why_stale,
)
from graphs.capture.inputs import DistinctInputs, Input, parameter_names
from graphs.errors import CaptureError
from graphs.torch_internals.artifacts import build_package, load_package
from graphs.torch_internals.exporting import export_module
from graphs.watch.causes import describe_failure

__all__ = ["AotiBackend", "build", "load"]

_PACKAGE = "graph.pt2"
_LAYOUT = "graph.json"
_VERSION = 3


class AotiBackend(Backend):
    """Captures with `torch.export`: what is not an input is fixed.

    A sub-module, hook or attribute of the module that changes makes the graph stale; a global that
    changes goes unnoticed.

    Options: `package_path`, a folder to keep the package in, for :meth:`load` (None: a temporary
    one until the graph is closed); `options`, inductor's settings.
    """

    name = "aoti"
    blind_to = ("globals",)
    options = MappingProxyType({"package_path": None, "options": None})

    def available(self) -> str | None:
        """Needs what backend `inductor` needs."""
        return InductorBackend().available()

    def capture(self, job: Job) -> Frozen:
        """Export, compile and load; the compile itself runs nothing."""
        if needs_gradients(job.function, job.examples):
            raise CaptureError(
                job.name, "a package has no gradients; capture under torch.no_grad()"
            )
        path = job.options["package_path"]
        folder = Path(path or tempfile.mkdtemp(prefix="graphs-aoti-"))

        def close() -> None:
            if path is None:
                shutil.rmtree(folder, ignore_errors=True)

        try:
            build(job.function, job.examples, folder, job.options["options"])
            frozen = load(folder, job.function)
            for _ in range(job.spec.warm_runs):
                frozen.run(*job.examples)
        except Exception as error:
            close()
            raise CaptureError(job.name, describe_failure(error)) from error
        return replace(frozen, close=close, is_loaded=False)

    def load(self, function: Callable[..., Any], path: str | Path, *, name: str) -> Frozen:
        """Load the package of an earlier capture of the same callable; compiles and runs nothing.

        A package is machine code: load only what you wrote.

        Raises:
            CaptureError: there is no package, or it was built for other tensors.
        """
        try:
            return load(Path(path), function)
        except Exception as error:
            raise CaptureError(name, describe_failure(error)) from error


def build(
    function: Callable[..., Any],
    example_inputs: Sequence[Input],
    folder: Path,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Compile `function` at the shapes of its examples into a package in `folder`.

    Raises:
        ValueError: it reads tensors that are neither inputs, parameters nor buffers, or returns
            something that a package cannot describe.
    """
    indices = [i for i, value in enumerate(example_inputs) if isinstance(value, Tensor)]
    if shared := DistinctInputs(function, indices).mismatch(example_inputs):
        raise ValueError(f"{shared}: give each a tensor of its own")
    stateless = Stateless(function, example_inputs)
    tensors = [value for value in example_inputs if isinstance(value, Tensor)]
    program = export_module(stateless, (*tensors, *stateless.state.now()))
    if names := constants_of_others(program, function):
        raise ValueError(
            f"reads tensors that would become constants of the package ({names}): make them "
            "inputs, or buffers of the module that is captured"
        )
    inputs = parameter_names(function, len(example_inputs))
    takes = [inputs[index] for index in indices]
    takes += [f"self.{spec.name}" for spec in stateless.state.specs]
    layout = json.dumps(_layout(stateless) | {"written": _written(program, takes)})
    folder.mkdir(parents=True, exist_ok=True)
    build_package(program, folder / _PACKAGE, options)
    (folder / _LAYOUT).write_text(layout)


def load(folder: Path, function: Callable[..., Any]) -> Frozen:
    """Load the package in `folder` as a graph that runs on the tensors of `function`.

    Raises:
        FileNotFoundError: there is no package.
        ValueError: the parameters and buffers of `function` differ from those it was built with, or
            it was built by another version.
    """
    path = folder / _PACKAGE
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}: capture it again")
    layout = json.loads((folder / _LAYOUT).read_text())
    if layout.get("version") != _VERSION:
        raise ValueError(f"{path} was written by another version of this library: capture it again")
    run = bind_state(function, layout, lambda: load_package(path))
    return Frozen(run, stale=why_stale, is_loaded=True, written=layout["written"])


def _written(program: torch.export.ExportedProgram, takes: Sequence[str]) -> list[str]:
    signature = program.run_decompositions({}).graph_signature  # before, it names no writes
    names = dict(zip(signature.user_inputs, takes, strict=True))
    return [names[each] for each in signature.user_inputs_to_mutate.values()]


def _layout(stateless: Stateless) -> dict[str, Any]:
    returned = stateless.returned
    for kind, leaf in returned.leaves:
        if kind == "constant":
            constant_of(leaf)
    return {
        "version": _VERSION,
        "takes": stateless.takes,
        "leaves": returned.leaves,
        "spec": pytree.treespec_dumps(returned.spec),
        "tensors": stateless.indices,
        "state": stateless.state.layout(),
    }
