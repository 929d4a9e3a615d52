"""Compiles grammars over a model's tokens with xgrammar (extra ``grammar``), up to a size limit.

The limits keep most compilations within about a minute. Time grows with vocabulary size times the
places where any of many characters may stand: classes, dots, strings of a schema with a length. It
grows with the square of places that follow each other, and faster for places that may be empty
(``?``, ``*``): no limit of the text covers all of these.
"""

from __future__ import annotations

import json
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiled_attn.engine.constraint import Matcher
from compiled_attn.engine.grammar import Grammar
from compiled_attn.errors import ConfigError
from compiled_attn.text.plain_tokenizer import PlainTokenizer
from compiled_attn.text.schema_keywords import unenforced
from compiled_attn.text.tokenizer import Tokenizer
from graphs.errors import clipped, quoted
from graphs.installation import install_command

__all__ = ["Grammars", "too_large"]

_MAX_TEXT, _MAX_LEVELS, _MAX_PLACES = 1 << 16, 64, 1024
_MAX_REPEATED = 256  # xgrammar needs no more time for further repetitions
_QUOTED = re.compile(r'"(\\.|[^"\\])*"|\\.')
_REPEATED = re.compile(r"\{(\d*)(?:,(\d*))?\}")
_WIDE = re.compile(r"\\.|[.\[]")
_CACHE_BYTES = 256 * 2**20
_MAX_CACHED = 64  # a request looks its grammar up several times
_CONTROLS = {*range(32)} - {*b"\n\r"}
_MAX_BLANKS = 24  # between two elements of JSON: models may repeat blanks without end
_THREADS = max(1, (os.cpu_count() or 1) // 4)  # the rest runs the model
_LOCATION = re.compile(r"^\[[\d:]+\] \S+: (Check failed: \(.*\) is false: )?")
_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "ebnf": "EBNF grammar"}


def too_large(grammar: Grammar) -> str:
    """Returns why a grammar takes too much time or memory to compile; empty if it does not."""
    text = grammar.text
    if len(text) > _MAX_TEXT:
        return f"it has {len(text):,} characters, more than {_MAX_TEXT:,}"
    if _count_levels(text) > _MAX_LEVELS:
        return f"it is nested more than {_MAX_LEVELS} levels deep"
    if (places := _count_places(grammar)) > _MAX_PLACES:
        return (
            f"it has {places:,} places for any of several characters (classes, dots, minLength, "
            f"maxLength, {{m,n}}, each repetition counted up to {_MAX_REPEATED}), more than "
            f"{_MAX_PLACES:,}"
        )
    return ""


def _count_levels(text: str) -> int:
    levels = most = 0
    for character in _QUOTED.sub("", text):
        levels += (character in "[{(") - (character in "]})")
        most = max(most, levels)
    return most


def _count_places(grammar: Grammar) -> int:
    if grammar.kind != "json_schema":
        return _expression_places(grammar.text)
    try:
        return sum(_schema_places(json.loads(grammar.text)))
    except ValueError:
        return 0  # xgrammar says what is wrong with it


def _schema_places(schema: Any) -> Iterator[int]:
    if isinstance(schema, list):
        for each in schema:
            yield from _schema_places(each)
    elif isinstance(schema, dict):
        for name, value in schema.items():
            if name in ("minLength", "maxLength") and isinstance(value, (int, float)):
                yield int(min(max(value, 0), _MAX_REPEATED))
            elif name == "pattern" and isinstance(value, str):
                yield _expression_places(value)
            elif name == "patternProperties" and isinstance(value, dict):
                yield sum(map(_expression_places, value))
            yield from _schema_places(value)


def _expression_places(text: str) -> int:
    repeated = _REPEATED.findall(text)
    counts = [max(int(number or 0) for number in found) for found in repeated]
    return len(_WIDE.findall(text)) + sum(min(count, _MAX_REPEATED) for count in counts)


class Grammars:
    """Compiles grammars for the tokens of a model and caches them; thread-safe.

    Imports xgrammar with the first grammar.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._compilers: dict[str, Any] = {}
        self._cache: dict[Grammar, Callable[[], Matcher]] = {}
        self._in_use: weakref.WeakValueDictionary[Grammar, Any] = weakref.WeakValueDictionary()
        self._vocab = 0

    def compiled(self, grammar: Grammar) -> Callable[[], Matcher]:
        """Returns a factory of matchers, see `compiled_attn.engine.constraint.Grammars`.

        Raises:
            ConfigError: xgrammar is not installed or refuses the grammar, or no token can begin it.
        """
        if (known := self.known(grammar)) is not None:
            return known
        with self._lock:
            self._compilers = self._compilers or self._make_compilers()
        reason = too_large(grammar)
        if not reason and grammar.kind == "json_schema":
            reason = unenforced(json.loads(grammar.text))
        if reason:
            raise _refusal(grammar, reason)
        from xgrammar import GrammarMatcher

        try:
            make = partial(GrammarMatcher, _compile(self._compilers[grammar.kind], grammar))
            first = make()
            is_empty, can_begin = first.is_completed(), self.masks([first]).any()
        except RuntimeError as error:
            reason = " ".join(_LOCATION.sub("", str(error)).split())
            raise _refusal(grammar, clipped(reason, 200)) from error
        if not can_begin:
            no_token = "no token of the model can begin it"
            raise _refusal(grammar, "only the empty text fits it" if is_empty else no_token)
        with self._lock:
            self._cache[grammar] = self._in_use[grammar] = make
            while len(self._cache) > _MAX_CACHED:
                del self._cache[next(iter(self._cache))]  # the oldest
        return make

    def known(self, grammar: Grammar) -> Callable[[], Matcher] | None:
        """Returns the result of `compiled` while it is cached or in use, else None; never waits."""
        return self._cache.get(grammar) or self._in_use.get(grammar)

    def masks(self, matchers: Sequence[Any]) -> NDArray[np.int32]:
        """Returns a bit mask of the allowed next tokens, int32 ``[n, ceil(vocab / 32)]``."""
        from xgrammar import BatchGrammarMatcher

        masks = np.zeros((len(matchers), -(-self._vocab // 32)), np.int32)
        BatchGrammarMatcher().batch_fill_next_token_bitmask([*matchers], masks)
        # Where nearly all tokens are allowed it sets the bits after the last one too.
        masks[:, -1] &= np.int32(0x7FFFFFFF >> (-self._vocab % 32 - 1) if self._vocab % 32 else -1)
        return masks

    def _make_compilers(self) -> dict[str, Any]:
        try:
            from xgrammar import GrammarCompiler, TokenizerInfo, VocabType
        except ImportError as error:
            raise ConfigError(
                f"a grammar needs {error.name}, which is not installed: "
                f"{install_command('grammar')}"
            ) from error
        tokenizer = self._tokenizer.of_transformers
        is_plain = isinstance(tokenizer, PlainTokenizer)
        try:
            known = tokenizer.to_transformers() if is_plain else tokenizer
            texts = [*TokenizerInfo.from_huggingface(known, stop_token_ids=[0]).decoded_vocab]
        except Exception as error:  # a kind of tokenizer that it does not know
            raise ConfigError(
                f"model {self._tokenizer.model}: xgrammar cannot read its tokenizer: {error}: ask "
                "without a grammar"
            ) from error
        for number, token in tokenizer.added_tokens_decoder.items():
            texts[number] = b"" if number in self._tokenizer.special else token.content.encode()
        self._vocab = len(texts)
        # In strings with a maxLength xgrammar allows characters that JSON must escape.
        json_texts = [b"" if _CONTROLS & {*text} else text for text in texts]

        def compiler(texts: list[bytes]) -> Any:
            # No end tokens: the request has them.
            vocabulary = TokenizerInfo(texts, VocabType.RAW, stop_token_ids=[])
            return GrammarCompiler(vocabulary, max_threads=_THREADS, cache_limit_bytes=_CACHE_BYTES)

        plain = compiler(texts)
        return {"json_schema": compiler(json_texts), "regex": plain, "ebnf": plain}


def _compile(compiler: Any, grammar: Grammar) -> Any:
    if grammar.kind == "json_schema":
        return compiler.compile_json_schema(grammar.text, max_whitespace_cnt=_MAX_BLANKS)
    if grammar.kind == "regex":
        return compiler.compile_regex(grammar.text)
    return compiler.compile_grammar(grammar.text)


def _refusal(grammar: Grammar, reason: str) -> ConfigError:
    return ConfigError(
        f"expected a {_NAMES[grammar.kind]} that xgrammar takes, got {quoted(grammar.text)}: "
        f"{reason}: correct it"
    )
