from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from compiled_attn.errors import ConfigError, ModelError
from compiled_attn.text import Tokenizer
from tests.compiled_attn.text.models import END, MODEL, USER, byte_level, save_model, save_tokenizer

HELLO = [{"role": "user", "content": "Hello"}]
LETTERS = st.text("ab th\n🎉", max_size=8)


@pytest.fixture(scope="module")
def plain(model_dir: Path) -> Tokenizer:
    return Tokenizer(model_dir)


def test_a_chat_is_encoded_by_the_models_template(plain):
    expected = plain.encode(f"{USER}Hello{END}{MODEL}")
    assert plain.encode(HELLO) == expected
    assert plain.decode(expected) == "Hello"


@given(LETTERS, st.lists(LETTERS.filter(bool), min_size=1, max_size=3))
def test_a_stop_string_is_found_with_the_token_that_completes_it(tokenizer, text, stop):
    tokens = tokenizer.encode(f"a{text}b")
    for count in range(1, len(tokens) + 1):
        decoded = tokenizer.decode(tokens[:count])
        found = tokenizer.has_stop(tokens[:count], stop)
        assert found == any(each in decoded for each in stop)
        if found:
            break


def test_only_the_end_of_a_long_text_is_decoded(plain, monkeypatch):
    tokens = plain.encode("a word " * 2000)
    decoded = []
    decode = plain.decode
    monkeypatch.setattr(plain, "decode", lambda some: decoded.append(len(some)) or decode(some))
    assert not plain.has_stop(tokens, ("\n\nUser:",))
    assert max(decoded) <= 32


@given(st.text("ab th\n🎉é½你", max_size=8))
def test_the_bytes_of_tokens_are_those_of_their_text(tokenizer, text):
    tokens = tokenizer.encode(f"a{text}")
    spelt = b"".join(map(tokenizer.bytes_of, tokens)).decode()
    assert spelt.removeprefix(" ") == tokenizer.decode(tokens)  # one that a decoder drops
    for token in tokens:
        assert tokenizer.bytes_of(token).decode(errors="replace") == tokenizer.text_of(token)


def test_a_special_token_reads_as_its_name(tokenizer):
    (end,) = tokenizer.of_transformers.encode(END, add_special_tokens=False)
    assert tokenizer.text_of(end) == END and tokenizer.bytes_of(end) == END.encode()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "with text, got an empty one"),
        (f"{USER}{END}", "with text, got only special tokens, '<user><end>'"),
        ("\udcff", "of valid text, got '.udcff': save it as UTF-8"),
        (7, r"expected messages, each with a role and a content of text, got 7"),
        ([], r"got \[\]"),
        ([{"role": "user"}], r"got \[\{'role': 'user'\}\]"),
        ([{"role": "user", "content": 7}], "'content': 7"),
        ([{"role": "system", "content": "x"}], "template takes, got .*: no system messages"),
    ],
)
def test_a_prompt_that_is_none_is_refused_in_one_line(plain, prompt, message):
    with pytest.raises(ConfigError, match=message) as caught:
        plain.encode(prompt)
    assert "\n" not in str(caught.value)


def test_a_model_without_a_template_says_so_and_takes_texts(tmp_path):
    save_model(tmp_path)
    save_tokenizer(byte_level(), tmp_path, template=None)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"
    with pytest.raises(ConfigError, match=r"has no chat template, expected .*: take an instruct"):
        tokenizer.encode(HELLO)


def test_a_directory_without_a_tokenizer_is_a_one_line_error(tmp_path):
    torch.manual_seed(0)
    save_model(tmp_path / "llama")
    with pytest.raises(ModelError, match="llama: it has no tokenizer, expected"):
        Tokenizer(tmp_path / "llama")
    (tmp_path / "llama" / "tokenizer.json").write_text("{oops")
    with pytest.raises(ModelError, match="llama: transformers cannot load a tokenizer") as caught:
        Tokenizer(tmp_path / "llama")
    assert "\n" not in str(caught.value)
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, eos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    (tmp_path / "gpt2" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelError, match="gpt2: it has no tokenizer, expected"):
        Tokenizer(tmp_path / "gpt2")
    with pytest.raises(ModelError, match="nowhere: no such directory"):
        Tokenizer(tmp_path / "nowhere")
