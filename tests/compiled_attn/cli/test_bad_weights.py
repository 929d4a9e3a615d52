"""Files of quantised weights that are damaged or not served: one line, exit code 2."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("gguf", reason="needs the extra gguf")
pytest.importorskip("accelerate", reason="needs the extra gguf")

from safetensors.torch import load_file, save_file

from compiled_attn.models.gguf_header import open_gguf
from tests.compiled_attn.cli.commands import assert_refused
from tests.compiled_attn.models.test_awq_gptq import checkpoint
from tests.compiled_attn.text.gguf_file import write_gguf

UP = "blk.1.ffn_up.weight"
LAYER = "model.layers.0.mlp.up_proj"


def _with_type(whole: bytes, kind: int) -> bytes:
    at = whole.index(UP.encode()) + len(UP) + 4 + 2 * 8  # dimensions come between
    return whole[:at] + kind.to_bytes(4, "little") + whole[at + 4 :]


@pytest.mark.parametrize("command_name", ["run", "serve", "bundle"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda whole: _with_type(whole, 16), f"tensor {UP} is of type IQ2_XXS"),
        (lambda whole: whole[:20], "truncated"),
        (lambda whole: whole[: whole.index(UP.encode()) + 5], "truncated"),
        (lambda whole: whole[:-4096], "truncated"),
    ],
)
def test_a_damaged_gguf_file_is_refused(
    command, tmp_path, monkeypatch, command_name, damage, words
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    file = tmp_path / "a.gguf"
    write_gguf(file)
    file.write_bytes(damage(file.read_bytes()))
    out = ["--out", tmp_path / "out"] if command_name == "bundle" else []
    assert_refused(command(command_name, file, *out), str(file), words, at_once=False)
    assert not (tmp_path / "out").exists()


def test_scales_that_are_not_finite_are_refused(command, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    file = tmp_path / "a.gguf"
    write_gguf(file)
    (tensor,) = (each for each in open_gguf(file).tensors if each.name == UP)
    whole = bytearray(file.read_bytes())
    at = whole.index(tensor.data.tobytes())
    for scale in (b"\x00\x7e", b"\x00\x7c", b"\x00\xfc"):  # NaN and infinities
        whole[at : at + 2] = scale
        file.write_bytes(whole)
        assert_refused(command("run", file), f"tensor {UP} (Q8_0)", "finite scales", at_once=False)


def test_a_gptq_checkpoint_of_3_bits_or_without_zero_points_is_refused(command, tmp_path):
    checkpoint(tmp_path, "gptq")
    state = load_file(tmp_path / "model.safetensors")
    zeros = state.pop(f"{LAYER}.qzeros")
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    assert_refused(command("run", tmp_path), f"{LAYER}.qzeros is missing")
    save_file(
        state | {f"{LAYER}.qzeros": zeros[:, :-1].contiguous()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    assert_refused(command("run", tmp_path), f"{LAYER}.qweight", "of one shape")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["bits"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_refused(command("run", tmp_path), "of 4 or 8 bits, got 3 bits")
