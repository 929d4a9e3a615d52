from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra hf")

from transformers import LlamaForCausalLM, PreTrainedModel, T5Config, T5ForConditionalGeneration
from transformers.utils import logging

from compiled_attn.models import ModelError, default_model, load_model
from compiled_attn.models.folder import model_folder
from tests.compiled_attn.tiny import tiny_model


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Directory of a Llama with two narrow layers."""
    tiny_model().save_pretrained(tmp_path)
    return tmp_path


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(ids).logits
    return result


def test_equal_seeds_build_equal_default_models_and_leave_the_random_state():
    before = torch.random.get_rng_state()
    first, second, other = default_model(1), default_model(1), default_model(2)
    assert torch.equal(torch.random.get_rng_state(), before)
    weights = [m.state_dict()["model.layers.3.mlp.up_proj.weight"] for m in (first, second, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_default_model_is_ready_to_serve_in_the_given_dtype():
    model = default_model(dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert model.config.eos_token_id is None and model.generation_config.eos_token_id is None


def test_greedy_texts_of_the_default_model_do_not_fall_into_a_loop():
    model = default_model()
    prompt = torch.arange(40)[None]
    text = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=60, do_sample=False
    )
    assert len(set(text[0, 40:].tolist())) > 45


def test_the_default_model_reads_its_whole_context():
    model = default_model()
    prompt = torch.randint(4096, (1, 400), generator=torch.Generator().manual_seed(0))
    changed = prompt.clone()
    changed[0, 3] += 1
    expected, actual = logits(model, prompt)[0, -1], logits(model, changed)[0, -1]
    assert (actual - expected).abs().max() > 0.1 * expected.std()


def test_a_saved_model_is_loaded_with_its_weights_and_without_a_network(saved, monkeypatch):
    def no_network(*_: Any, **__: Any) -> None:
        raise AssertionError("opened a network connection")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    model = load_model(saved)
    ids = torch.arange(8)[None]
    assert torch.equal(logits(model, ids), logits(LlamaForCausalLM.from_pretrained(saved), ids))
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert load_model(saved, torch.bfloat16).dtype == torch.bfloat16


def test_loading_prints_nothing_and_restores_the_logging_of_transformers(saved, capfd):
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    capfd.readouterr()
    load_model(saved)
    change_config(saved, num_hidden_layers=3)
    with pytest.raises(ModelError):
        load_model(saved)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "nope"}, "model type `nope`"),
        ({"model_type": "clip"}, "AutoModelForCausalLM"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_hidden_layers": 3}, r"9 weights are missing .*model\.layers\.2\.input_layernorm"),
        ({"intermediate_size": 64}, r"6 weights are missing or have a shape .*mlp\.down_proj"),
    ],
)
def test_a_directory_that_is_no_causal_lm_is_a_one_line_error(saved, changes, message):
    change_config(saved, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(saved)
    assert str(saved) in str(caught.value) and "\n" not in str(caught.value)


def test_unreadable_files_are_one_line_errors(saved):
    weights, config = saved / "model.safetensors", saved / "config.json"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot load it as a causal language model"):
        load_model(saved)
    weights.unlink()
    with pytest.raises(ModelError, match=r"no file named model\.safetensors"):
        load_model(saved)
    config.write_text("{oops")
    with pytest.raises(ModelError, match="not a valid JSON file"):
        load_model(saved)
    config.unlink()
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        load_model(saved)


def test_pickled_weights_are_never_opened(saved):
    weights = saved / "model.safetensors"
    torch.save(load_model(saved).state_dict(), saved / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(ModelError, match="cannot load"):
        load_model(saved)


def test_a_path_that_is_no_directory_is_named(tmp_path):
    with pytest.raises(ModelError, match="somewhere: no such directory; expected"):
        load_model(tmp_path / "somewhere")


@pytest.fixture
def hub(tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with one model, ``someone/tiny``."""
    folder = tmp_path / "hub" / "models--someone--tiny"
    commit = "a" * 40
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file in saved.iterdir():
        if file.is_file():
            (snapshot / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(socket.socket, "connect", None)  # no network access
    monkeypatch.chdir(tmp_path)
    return snapshot


@pytest.mark.parametrize("given", ["someone/tiny", Path("someone/tiny")])
def test_a_hub_id_is_the_snapshot_in_the_local_cache(hub, given):
    assert model_folder(given) == hub
    ids = torch.arange(9)[None]
    assert torch.equal(logits(load_model(given), ids), logits(load_model(hub), ids))


def test_a_hub_id_that_was_not_downloaded_is_refused_with_the_command(hub):
    with pytest.raises(
        ModelError, match=r"no such directory, .*download it with hf download some/o"
    ):
        load_model("some/other")
    Path("someone/tiny").mkdir(parents=True)  # a directory comes first
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        load_model("someone/tiny")


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "torchao"),
    ],
)
def test_weights_that_cannot_be_cast_are_refused_before_they_are_read(saved, settings, method):
    change_config(saved, quantization_config=settings)
    (saved / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(ModelError, match=f"quantised by {method}, expected float weights"):
        load_model(saved)


def test_an_encoder_decoder_is_called_one(tmp_path):
    config = T5Config(d_model=32, num_layers=1, num_heads=2, vocab_size=64, d_kv=16, d_ff=64)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match=r"it is an encoder-decoder \(t5\), expected a decoder-only"
    ):
        load_model(tmp_path)
