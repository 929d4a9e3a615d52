"""The tokenizer without transformers, against that of transformers."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from compiled_attn.errors import ModelError
from compiled_attn.text import Grammars, Tokenizer
from compiled_attn.text.plain_tokenizer import TEMPLATE_ARGUMENTS, PlainTokenizer

USER = {"role": "user", "content": "Hello, 你好 <end> 🎉"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
MESSAGES = "{% for m in messages %}"
TEMPLATES = [
    MESSAGES + "\n    {{- m.role }}: {{ m['content'] | trim }}\n{% endfor %}\n{{ eos_token }}",
    "{{ tools | tojson(indent=2) }}{% if documents is none %}no <documents>{% endif %}",
    MESSAGES + "{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ dict(a=1) }}{{ style }}",
    MESSAGES + "{{ m.reasoning_content }}{{ m.name is defined }}{% endfor %}",
]


@pytest.fixture
def both(tokenizer, tmp_path) -> tuple[PreTrainedTokenizerBase, PlainTokenizer]:
    PlainTokenizer.write(tokenizer.of_transformers, tmp_path)
    return tokenizer.of_transformers, PlainTokenizer.read(tmp_path)


def test_ids_and_texts_are_those_of_transformers(both):
    own, plain = both
    wrapped, expected = Tokenizer(plain), Tokenizer(own)
    assert (wrapped.special, wrapped.longest) == (expected.special, expected.longest)

    @given(st.text(max_size=40) | st.just("<user>a<end> b\n\n"))
    def check(text):
        tokens = own(text).input_ids
        assert plain(text).input_ids == tokens
        assert plain(text, add_special_tokens=False) == {
            "input_ids": own(text, add_special_tokens=False).input_ids
        }
        assert wrapped.decode(tokens) == expected.decode(tokens)
        for token in tokens[:4]:
            assert wrapped.text_of(token) == expected.text_of(token)
            assert wrapped.bytes_of(token) == expected.bytes_of(token)

    check()


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_render_as_in_transformers(both, tmp_path, template):
    own, _ = both
    own.chat_template = template
    PlainTokenizer.write(own, tmp_path)
    plain = PlainTokenizer.read(tmp_path)
    messages = [USER, {"role": "assistant", "content": "a", "thinking": "b", "name": None}]
    for tools in (None, [TOOL]):
        options = {"tools": tools, "add_generation_prompt": True, "style": "short"}
        expected = own.apply_chat_template(messages, tokenize=False, **options)
        assert plain.apply_chat_template(messages, tokenize=False, **options) == expected
        ids = own.apply_chat_template(messages, return_dict=True, tokenize=True, **options)
        assert plain.apply_chat_template(messages, **options)["input_ids"] == ids["input_ids"]


def test_templates_stay_in_their_sandbox(both, tmp_path):
    own, _ = both
    for template in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ x.y.z }}"):
        own.chat_template = template
        PlainTokenizer.write(own, tmp_path)
        plain = PlainTokenizer.read(tmp_path)
        with pytest.raises(Exception, match=r"unsafe|undefined"):
            plain.apply_chat_template([USER])
        with pytest.raises(Exception, match=r"unsafe|undefined"):
            own.apply_chat_template([USER])


def test_arguments_that_are_no_variables_of_a_template():
    parameters = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    assert {*parameters} <= TEMPLATE_ARGUMENTS


def test_a_grammar_has_the_same_vocabulary(both):
    own, plain = both
    made = [Grammars(Tokenizer(each)) for each in (own, plain)]
    assert made[0]._make_compilers().keys() == made[1]._make_compilers().keys()
    assert made[0]._vocab == made[1]._vocab


def test_a_tokenizer_with_code_of_its_own_is_refused(both, tmp_path):
    own, _ = both
    changed = type("Changed", (type(own),), {"_decode": lambda self, *_, **__: ""})
    own.__class__ = changed
    with pytest.raises(ModelError, match="a tokenizer that is Rust alone, got a Changed"):
        PlainTokenizer.write(own, tmp_path)
