"""AWQ and GPTQ checkpoints stay packed, and are refused in one line where they do not fit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("accelerate", reason="needs the extra gguf")

from safetensors.torch import load_file, save_file

from compiled_attn.models import ModelError, load_model
from compiled_attn.models.packed import quantised_formats
from tests.compiled_attn.tiny import tiny_model

AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]  # outputs in an int32, from its lowest bits on


def pack(codes: Tensor, bits: int, dim: int, columns: list[int] | None = None) -> Tensor:
    """Codes as int32 along a dimension, bit by bit in Python integers."""
    count = 32 // bits
    moved = codes.movedim(dim, -1).unflatten(-1, (-1, count))
    words = torch.zeros(moved.shape[:-1], dtype=torch.int64)
    for place, column in enumerate(columns or range(count)):
        words |= moved[..., column].long() << bits * place
    signed = torch.where(words >= 2**31, words - 2**32, words).int()
    return signed.movedim(-1, dim).contiguous()


def quantised(
    method: str, weight: Tensor, bits: int, group: int, act_order: bool, version: str = "gptq"
) -> tuple[dict[str, Tensor], Tensor]:
    """A layer of random codes as a checkpoint has it, and its weight ``[N, K]``."""
    outputs, inputs = weight.shape
    codes = torch.randint(0, 1 << bits, (inputs, outputs))
    zeros = torch.randint(1, 1 << bits, (inputs // group, outputs))
    scales = (torch.rand(inputs // group, outputs) * 0.02).half()
    groups = torch.arange(inputs) // group
    if act_order:
        groups = groups[torch.randperm(inputs)]
    exact = (codes - zeros[groups]) * scales.double()[groups]
    if method == "awq":
        parts = {
            "qweight": pack(codes, 4, 1, AWQ_COLUMNS), "qzeros": pack(zeros, 4, 1, AWQ_COLUMNS),
        }  # fmt: skip
    else:
        stored = zeros - 1 if version == "gptq" else zeros
        parts = {"qweight": pack(codes, bits, 0), "qzeros": pack(stored, bits, 1)}
        parts["g_idx"] = groups.int()
    return {**parts, "scales": scales}, exact.T


def checkpoint(folder: Path, method: str, **settings: Any) -> dict[str, Tensor]:
    """Writes a Llama whose layers are quantised; returns its plain weights."""
    torch.manual_seed(0)
    bits, group = settings.get("bits", 4), settings.get("group_size", 32)
    act_order, version = settings.get("desc_act", False), settings.get("checkpoint_format", "gptq")
    model = tiny_model("llama", num_hidden_layers=1)
    model.save_pretrained(folder)
    state, plain = load_file(folder / "model.safetensors"), {}
    for name, weight in [*state.items()]:
        plain[name] = weight
        if name.endswith("_proj.weight"):
            layer = name.removesuffix(".weight")
            parts, plain[name] = quantised(method, weight, bits, group, act_order, version)
            state |= {f"{layer}.{part}": value for part, value in parts.items()}
            del state[name]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 32} | settings
    (folder / "config.json").write_text(json.dumps(config))
    return plain


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("awq", {"version": "gemm", "zero_point": True}),
        ("gptq", {}),
        ("gptq", {"bits": 8, "checkpoint_format": "gptq_v2"}),
        ("gptq", {"desc_act": True}),
    ],
)
def test_weights_stay_packed_and_are_those_of_the_checkpoint(tmp_path, method, settings):
    plain = checkpoint(tmp_path, method, **settings)
    model = load_model(tmp_path)
    assert quantised_formats(model) == {method.upper()}
    state = model.state_dict()
    assert state.keys() == plain.keys()
    for name, weight in plain.items():
        torch.testing.assert_close(state[name], weight.float(), rtol=1e-5, atol=1e-6)
    expected = tiny_model("llama", num_hidden_layers=1)
    expected.load_state_dict({name: weight.float() for name, weight in plain.items()})
    ids = torch.arange(9)[None]
    with torch.no_grad():
        logits, exact = model(ids).logits, expected.eval()(ids).logits
    torch.testing.assert_close(logits, exact, rtol=1e-3, atol=1e-4)


def test_the_missing_package_is_named(tmp_path, monkeypatch):
    checkpoint(tmp_path, "awq")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ModelError, match=r"accelerate, which is not installed: pip install .*gguf"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("gptq", {"bits": 3}, "expected gptq weights of 4 or 8 bits, got 3 bits"),
        ("awq", {"version": "gemv"}, "version gemm, got 4 bits, version gemv"),
    ],
)
def test_other_kinds_are_refused(tmp_path, method, settings, message):
    checkpoint(tmp_path, method, **({} if "bits" in settings else settings))
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= settings
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path)


NAME = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("scales", lambda s: s * torch.nan, rf"tensor {NAME}\.qweight: expected finite scales"),
        ("scales", lambda s: s[:1], "expected scales and zero points of one shape"),
        ("scales", lambda s: None, rf"tensor {NAME}\.scales is missing"),
        ("g_idx", lambda g: g * 0, "groups of 32 inputs in g_idx, got others"),
        ("g_idx", lambda g: g + 1, "in g_idx, got others"),
        ("g_idx", lambda g: g - 1, "in g_idx, got others"),
        ("g_idx", lambda g: g[:-1], "in g_idx, got others"),
        ("g_idx", lambda g: g.float(), r"g_idx .* got torch\.float32"),
        ("scales", lambda s: s.int(), r"scales of floats, .* got torch\.int32"),
        ("scales", lambda s: s[0], r"scales of floats, .* got torch\.float16 \[96\]"),
        ("scales", lambda s: s * torch.inf, "expected finite scales"),
        ("qzeros", lambda z: None, rf"tensor {NAME}\.qzeros is missing"),
        ("qzeros", lambda z: z[:0], r"qzeros as a matrix of int32, .* got torch\.int32 \[0, 12\]"),
        ("qzeros", lambda z: z.long(), r"qzeros .* got torch\.int64"),
        ("qzeros", lambda z: z.repeat(3, 1), "groups of 10 inputs in g_idx, got others"),
        ("qweight", lambda q: q.float(), r"qweight .* got torch\.float32"),
        ("qweight", lambda q: None, rf"tensor {NAME}\.qweight is missing"),
        ("qweight", lambda q: q[:-4], f"tensor {NAME}.qweight"),
    ],
)
def test_damaged_layers_are_refused_by_name(tmp_path, part, change, message):
    checkpoint(tmp_path, "gptq")
    state = load_file(tmp_path / "model.safetensors")
    changed = change(state.pop(f"{NAME}.{part}"))
    if changed is not None:
        state[f"{NAME}.{part}"] = changed.contiguous()
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path)


def test_a_layer_that_lost_the_order_of_its_inputs_is_refused(tmp_path):
    checkpoint(tmp_path, "gptq", desc_act=True)
    state = load_file(tmp_path / "model.safetensors")
    del state[f"{NAME}.g_idx"]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=rf"tensor {NAME}\.g_idx is missing"):
        load_model(tmp_path)


def test_groups_that_do_not_divide_the_inputs_are_refused(tmp_path):
    checkpoint(tmp_path, "awq")
    state = load_file(tmp_path / "model.safetensors")
    for part in ("qzeros", "scales"):
        state[f"{NAME}.{part}"] = state[f"{NAME}.{part}"].repeat(2, 1)[:3].contiguous()
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"groups of 16, 32, 64 ... inputs that divide 64, got 3"):
        load_model(tmp_path)


def test_a_zero_point_beyond_a_byte_is_refused(tmp_path):
    checkpoint(tmp_path, "gptq", bits=8)
    state = load_file(tmp_path / "model.safetensors")
    state[f"{NAME}.qzeros"].fill_(-1)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="zero points of at most 255, got 256"):
        load_model(tmp_path)
