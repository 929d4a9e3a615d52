"""Factors of a compiled artifact: everything that it depends on, as a list to be printed."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphs.capture.inputs import Input, InputsCheck, InputSpec, tensors_of
from graphs.capture.settings import Settings
from graphs.cgroups import lines_of
from graphs.files import short_digest
from graphs.store.modules import version_of
from graphs.store.sources import CodeDigests
from graphs.store.values import describe
from graphs.torch_internals.settings import custom_passes, settings_digests, settings_snapshot

__all__ = ["environment_factors", "graph_factors", "key_of"]

_ANY = -1


def key_of(factors: Mapping[str, Any]) -> str:
    """SHA-256 of factors, whatever their order.

    Raises:
        TypeError: they are not made of text, numbers, None and lists and mappings of them.
    """
    text = json.dumps(dict(factors), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def environment_factors() -> dict[str, Any]:
    """What machine code depends on besides its graph: versions, processor, accelerators."""
    return {
        "torch": f"{torch.__version__} {getattr(torch.version, 'git_version', '')}".strip(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()} {' '.join(platform.libc_ver())}",
        "cpu": _cpu(),
        "accelerators": _accelerators(),
    }


def graph_factors(
    function: Callable[..., Any],
    inputs: Sequence[Input],
    *,
    backend: str,
    options: Mapping[str, Any],
    dims: Sequence[Sequence[int]] = (),
    digests: CodeDigests | None = None,
) -> dict[str, Any] | None:
    """Everything that the graph of a callable at the shapes of its inputs depends on.

    Source files of the callable, of all that it imports (installed packages by their version) and
    of this package; attributes, closures and globals that are not tensors; shapes, dtypes, devices
    and strides of its inputs, parameters and buffers; the settings of torch and inductor, and the
    environment. Functions replaced in modules of installed packages, and objects nested deeper than
    six levels, are not seen.

    Args:
        function: the callable to capture.
        inputs: example inputs.
        backend: its name.
        options: of the backend.
        dims: of each input, the dimensions whose sizes are symbolic.
        digests: of code, if captures before this one may have changed globals.

    Returns:
        None if an option, or a custom pass of inductor, is an object without a `uuid()`, whose
        effect cannot be recorded.
    """
    described = _options({**custom_passes(), **options})
    if described is None:
        return None
    description = describe(function)
    sources, globals_digest = (digests or CodeDigests()).read(description.objects)
    return {
        **environment_factors(),
        "backend": backend,
        "options": described,
        "settings": _settings(),
        "mode": {name: str(value) for name, value in _mode().items()},
        "inputs": [
            str(_any_size(spec, own))
            for spec, own in zip(
                InputsCheck(function, inputs).specs, chain(dims, repeat(())), strict=False
            )
        ],
        "state": _state(function),
        "values": description.digest,
        "sources": sources,
        "globals": globals_digest,
    }


def _mode() -> dict[str, Any]:
    attention = torch.backends.cuda
    return {
        **Settings.current()._asdict(),
        "device": torch.get_default_device(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "cudnn": torch.backends.cudnn.enabled,
        "flash_sdp": attention.flash_sdp_enabled(),
        "mem_efficient_sdp": attention.mem_efficient_sdp_enabled(),
        "math_sdp": attention.math_sdp_enabled(),
        "cudnn_sdp": attention.cudnn_sdp_enabled(),
    }


def _any_size(spec: InputSpec, dims: Sequence[int]) -> InputSpec:
    # A stride that depends on a symbolic size may have any value too.
    if not dims or spec.shape is None or spec.stride is None:
        return spec
    strides, inner = spec.stride, min(spec.stride[dim] for dim in dims)
    return replace(
        spec,
        shape=tuple(_ANY if dim in dims else size for dim, size in enumerate(spec.shape)),
        stride=tuple(_ANY if stride > inner else stride for stride in strides),
    )


@functools.lru_cache(maxsize=1)
def _cpu() -> str:
    # `-march=native` depends on these.
    names = ("model name", "flags", "Features", "CPU part")
    lines: dict[str, str] = {}
    for line in lines_of(Path("/proc/cpuinfo")):
        name, _, value = line.partition(":")
        if name.strip() in names:
            lines.setdefault(name.strip(), value.strip())
    if not lines:
        lines["processor"] = platform.processor()
    model, digest = lines.get("model name") or platform.machine(), short_digest(json.dumps(lines))
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}, flags {digest}"


def _accelerators() -> list[str]:
    if not torch.cuda.is_available():
        return []
    built = torch.version.cuda or torch.version.hip
    devices = range(torch.cuda.device_count())
    compiles = f"{built}, triton {version_of('triton')}"
    return [
        f"{torch.cuda.get_device_name(i)} {torch.cuda.get_device_capability(i)} {compiles}"
        for i in devices
    ]


def _state(function: Callable[..., Any]) -> str:
    if not isinstance(function, nn.Module):
        return ""
    named = tensors_of(function)
    text = "\n".join(
        f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.device} {tensor.stride()}"
        for name, tensor in named
    )
    return f"{len(named)} tensors {short_digest(text)}"


def _options(options: Mapping[str, Any]) -> dict[str, str] | None:
    described = {}
    for name, value in sorted(options.items()):
        text = _text_of(value)
        if text is None:
            return None
        described[name] = text
    return described


def _text_of(value: Any) -> str | None:
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        parts = [_text_of(each) for each in value]
        return None if None in parts else f"{type(value).__name__}{parts}"
    if isinstance(value, Mapping):
        inner = _options({str(name): each for name, each in value.items()})
        return None if inner is None else str(inner)
    if callable(uuid := getattr(value, "uuid", None)) and (identity := uuid()) is not None:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return f"{kind} {short_digest(repr(identity))}"
    return None


def _settings() -> str:
    return _settings_at(*settings_digests())


@functools.lru_cache(maxsize=16)
def _settings_at(*_: bytes) -> str:
    settings = {
        name: _text_of(value) or type(value).__qualname__ for name, value in settings_snapshot()
    }
    return short_digest(json.dumps(settings, sort_keys=True))
