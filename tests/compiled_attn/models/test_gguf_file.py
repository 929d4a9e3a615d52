"""GGUF files are loaded with weights as the file has them, and refused in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("gguf", reason="needs the extra gguf")

import gguf
from transformers import AutoModelForCausalLM

from compiled_attn.models import ModelError, load_model, plain_folder
from compiled_attn.models.gguf_header import fast_readers
from compiled_attn.models.hf.rounding import last_logits, rounding_of
from compiled_attn.models.packed import (
    dequantise_layers,
    packed_weights,
    plain_layers,
    quantised_formats,
)
from compiled_attn.models.quantised_layers import QuantisedLayer
from tests.compiled_attn.text.gguf_file import LAYERS, write_gguf


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not by the environment: kernels would be built there.
    monkeypatch.setattr("compiled_attn.models.folder.cache_folder", (tmp_path / "caches").joinpath)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_0"])
def test_weights_stay_in_the_bits_of_the_file(file, kind):
    write_gguf(file, kind=kind)
    plain = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    model = load_model(file)
    assert quantised_formats(model) == {kind} and packed_weights(model) == 3 * LAYERS
    state = model.state_dict()
    assert state.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():  # rows of q and k are in another order
        torch.testing.assert_close(state[name], value.float(), rtol=1e-6, atol=1e-6)
    ids = torch.arange(9)[None]
    for module in model.modules():
        if isinstance(module, QuantisedLayer):
            assert module.int8_inputs and not module.weight.untyped_storage().nbytes() > 4
            module.int8_inputs = False
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-3, atol=1e-3)


def test_a_fast_reader_reads_what_the_plain_one_does(file):
    write_gguf(file, kind="Q4_1")
    reader = gguf.GGUFReader
    plain = reader(file)
    with pytest.raises(KeyError), fast_readers():
        fast = gguf.GGUFReader(file)
        raise KeyError
    assert gguf.GGUFReader is reader
    assert type(fast.data) is np.ndarray and fast.fields.keys() == plain.fields.keys()
    for name, field in plain.fields.items():
        other = fast.fields[name]
        assert (other.types, other.data) == (field.types, field.data)
        assert [part.tolist() for part in other.parts] == [part.tolist() for part in field.parts]
    for one, other in zip(fast.tensors, plain.tensors, strict=True):
        assert (one.name, one.tensor_type) == (other.name, other.tensor_type)
        np.testing.assert_array_equal(one.data, other.data)


def test_layers_can_be_made_plain(file):
    write_gguf(file, kind="Q4_0")
    model, plain = load_model(file), load_model(file)
    dequantise_layers(plain)
    assert not quantised_formats(plain)
    state = model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())
    with plain_layers(model), torch.no_grad():
        logits = model(torch.arange(9)[None]).logits
    expected = plain(torch.arange(9)[None]).logits
    assert (logits - expected).square().mean().sqrt() < 0.02 * expected.std()  # int8 inputs


def test_other_programs_get_a_directory_of_plain_weights(file):
    write_gguf(file)
    folder = plain_folder(file)
    assert plain_folder(file) == folder == plain_folder(folder)
    state, plain = load_model(file).state_dict(), AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())


def test_new_weights_for_those_of_a_file_are_refused(file):
    write_gguf(file)
    model = load_model(file)
    with pytest.raises(RuntimeError, match=r"expected no new weight for .*up_proj.weight.* Q8_0"):
        model.load_state_dict(model.state_dict())


def test_a_file_without_a_weight_is_refused(file):
    write_gguf(file, missing="blk.1.ffn_up.weight")
    with pytest.raises(ModelError, match=r"1 weights are missing, model\.layers\.1\.mlp\.up_proj"):
        load_model(file)


def _patch(file: Path, name: str, values: bytes) -> None:
    """Overwrites the beginning of a tensor."""
    (tensor,) = (each for each in gguf.GGUFReader(file).tensors if each.name == name)
    with file.open("r+b") as opened:
        opened.seek(int(tensor.data_offset))
        opened.write(values)


def test_scales_that_are_not_finite_are_refused(file):
    write_gguf(file)
    _patch(file, "blk.0.ffn_up.weight", np.array([np.nan], "<f2").tobytes())
    with pytest.raises(
        ModelError, match=r"tensor blk\.0\.ffn_up\.weight \(Q8_0\): .*finite scales"
    ):
        load_model(file)


def test_a_file_that_is_cut_off_is_refused(file):
    write_gguf(file)
    file.write_bytes(file.read_bytes()[:-4096])
    with pytest.raises(ModelError, match=r"tensor blk\.\S+ cannot be read .*truncated"):
        load_model(file)


@pytest.mark.parametrize(("kind", "message"), [(20, "is of type IQ4_NL"), (99, "is of type 99")])
def test_types_that_are_not_served_are_refused(file, kind, message):
    write_gguf(file)
    whole, name = file.read_bytes(), b"blk.1.ffn_up.weight"
    at = whole.index(name) + len(name) + 4 + 2 * 8  # dimensions come between
    file.write_bytes(whole[:at] + kind.to_bytes(4, "little") + whole[at + 4 :])
    with pytest.raises(ModelError, match=rf"tensor blk\.1\.ffn_up\.weight {message}"):
        load_model(file)


def test_the_rounding_of_inputs_to_int8_is_measured(file):
    write_gguf(file, kind="Q4_0")
    model = load_model(file)
    logits = last_logits(model, [1, 2, 3])
    measured = rounding_of(model, [1, 2, 3], logits)
    assert measured is not None and measured.deviation > 0
    assert torch.equal(last_logits(model, [1, 2, 3]), logits)  # inputs are rounded again
