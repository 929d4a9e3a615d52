"""Grammars over the tokens of a model, by xgrammar (extra ``grammar``), and bounds of their size.

The bounds keep the compilation of most within a minute or so. The time grows with the tokens of the
vocabulary times the places of a text where any of many characters may stand: classes, dots, strings
of a schema that have a length; spelt out one behind the other with the square of these. Places that
may be empty (``?``, ``*``) cost more than that: no bound of the text holds for all of them.
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
from compiled_attn.text.schema_keywords import unenforced
from compiled_attn.text.tokenizer import Tokenizer
from graphs.errors import clipped, quoted
from graphs.installation import install_command

__all__ = ["Grammars", "too_large"]

_MOST_TEXT, _MOST_LEVELS, _MOST_PLACES = 1 << 16, 64, 1024
_PLACES_THAT_COST = 256  # of a repetition; further ones are the same to xgrammar
_QUOTED = re.compile(r'"(\\.|[^"\\])*"|\\.')
_REPEATED = re.compile(r"\{(\d*)(?:,(\d*))?\}")
_WIDE = re.compile(r"\\.|[.\[]")
_CACHE_BYTES = 256 * 2**20
_KEPT = 64  # grammars: a request asks for its own several times
_CONTROLS = {*range(32)} - {*b"\n\r"}
_BLANKS = 24  # between two elements of JSON, at most: what ends if a model likes blanks
_THREADS = max(1, (os.cpu_count() or 1) // 4)  # of one compilation, beside a model that runs
_PLACE = re.compile(r"^\[[\d:]+\] \S+: (Check failed: \(.*\) is false: )?")
_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "ebnf": "EBNF grammar"}


def too_large(grammar: Grammar) -> str:
    """Why a grammar would take too long to compile, or too much memory; empty if it would not."""
    text = grammar.text
    if len(text) > _MOST_TEXT:
        return f"it has {len(text):,} characters, more than {_MOST_TEXT:,}"
    if _levels(text) > _MOST_LEVELS:
        return f"it is nested more than {_MOST_LEVELS} levels deep"
    if (places := _places(grammar)) > _MOST_PLACES:
        return (
            f"it has {places:,} places for any of several characters (classes, dots, minLength, "
            f"maxLength, {{m,n}}, each repetition counted up to {_PLACES_THAT_COST}), more than "
            f"{_MOST_PLACES:,}"
        )
    return ""


def _unenforced(grammar: Grammar) -> str:
    if grammar.kind != "json_schema":
        return ""
    return unenforced(json.loads(grammar.text))


def _levels(text: str) -> int:
    levels = most = 0
    for character in _QUOTED.sub("", text):
        levels += (character in "[{(") - (character in "]})")
        most = max(most, levels)
    return most


def _places(grammar: Grammar) -> int:
    if grammar.kind != "json_schema":
        return _of_expression(grammar.text)
    try:
        return sum(_of_schema(json.loads(grammar.text)))
    except ValueError:
        return 0  # xgrammar tells what is wrong with it


def _of_schema(schema: Any) -> Iterator[int]:
    if isinstance(schema, list):
        for each in schema:
            yield from _of_schema(each)
    elif isinstance(schema, dict):
        for name, value in schema.items():
            if name in ("minLength", "maxLength") and isinstance(value, (int, float)):
                yield int(min(max(value, 0), _PLACES_THAT_COST))
            elif name == "pattern" and isinstance(value, str):
                yield _of_expression(value)
            elif name == "patternProperties" and isinstance(value, dict):
                yield sum(map(_of_expression, value))
            yield from _of_schema(value)


def _of_expression(text: str) -> int:
    repeated = _REPEATED.findall(text)
    counts = [max(int(number or 0) for number in found) for found in repeated]
    return len(_WIDE.findall(text)) + sum(min(count, _PLACES_THAT_COST) for count in counts)


class Grammars:
    """Compiles grammars for the tokens of a model, each once; for any number of threads.

    xgrammar is imported when the first grammar comes.

    Args:
        tokenizer: that of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._compilers: dict[str, Any] = {}
        self._known: dict[Grammar, Callable[[], Matcher]] = {}
        self._held: weakref.WeakValueDictionary[Grammar, Any] = weakref.WeakValueDictionary()
        self._vocab = 0

    def compiled(self, grammar: Grammar) -> Callable[[], Matcher]:
        """What makes matchers, see `compiled_attn.engine.constraint.Grammars`.

        Raises:
            ConfigError: xgrammar refuses the grammar, no token can begin it, or it is not
                installed.
        """
        if (known := self.known(grammar)) is not None:
            return known
        with self._lock:
            self._compilers = self._compilers or self._of_vocabulary()
        if reason := too_large(grammar) or _unenforced(grammar):
            raise _refusal(grammar, reason)
        from xgrammar import GrammarMatcher

        try:
            make = partial(GrammarMatcher, _compiled(self._compilers[grammar.kind], grammar))
            first = make()
            is_empty, can_begin = first.is_completed(), self.masks([first]).any()
        except RuntimeError as error:
            reason = " ".join(_PLACE.sub("", str(error)).split())
            raise _refusal(grammar, clipped(reason, 200)) from error
        if not can_begin:
            got = (
                "only the empty text fits it" if is_empty else "no token of the model can begin it"
            )
            raise _refusal(grammar, got)
        with self._lock:
            self._known[grammar] = self._held[grammar] = make
            while len(self._known) > _KEPT:
                del self._known[next(iter(self._known))]  # the oldest
        return make

    def known(self, grammar: Grammar) -> Callable[[], Matcher] | None:
        """What `compiled` returned, while it is cached or anybody holds it; waits for nothing."""
        return self._known.get(grammar) or self._held.get(grammar)

    def masks(self, matchers: Sequence[Any]) -> NDArray[np.int32]:
        """Which tokens may come next, ``[n, ceil(vocab / 32)]``."""
        from xgrammar import BatchGrammarMatcher

        masks = np.zeros((len(matchers), -(-self._vocab // 32)), np.int32)
        BatchGrammarMatcher().batch_fill_next_token_bitmask([*matchers], masks)
        # Where nearly all is allowed it sets the bits behind the last token too.
        masks[:, -1] &= np.int32(0x7FFFFFFF >> (-self._vocab % 32 - 1) if self._vocab % 32 else -1)
        return masks

    def _of_vocabulary(self) -> dict[str, Any]:
        """Compilers of each kind of grammar over the tokens that stand for text."""
        try:
            from xgrammar import GrammarCompiler, TokenizerInfo, VocabType
        except ImportError as error:
            raise ConfigError(
                f"a grammar needs {error.name}, which is not installed: "
                f"{install_command('grammar')}"
            ) from error
        tokenizer = self._tokenizer.of_transformers
        try:
            texts = [*TokenizerInfo.from_huggingface(tokenizer, stop_token_ids=[0]).decoded_vocab]
        except Exception as error:  # of a kind of tokenizer that it does not know
            raise ConfigError(
                f"model {self._tokenizer.model}: xgrammar cannot read its tokenizer: {error}: ask "
                "without a grammar"
            ) from error
        for number, token in tokenizer.added_tokens_decoder.items():
            texts[number] = b"" if number in self._tokenizer.special else token.content.encode()
        self._vocab = len(texts)
        # xgrammar lets a string with a maxLength have what JSON must escape.
        of_json = [b"" if _CONTROLS & {*text} else text for text in texts]

        def over(texts: list[bytes]) -> Any:
            # No token ends a text here: which do is a matter of the request.
            vocabulary = TokenizerInfo(texts, VocabType.RAW, stop_token_ids=[])
            return GrammarCompiler(vocabulary, max_threads=_THREADS, cache_limit_bytes=_CACHE_BYTES)

        plain = over(texts)
        return {"json_schema": over(of_json), "regex": plain, "ebnf": plain}


def _compiled(compiler: Any, grammar: Grammar) -> Any:
    if grammar.kind == "json_schema":
        return compiler.compile_json_schema(grammar.text, max_whitespace_cnt=_BLANKS)
    if grammar.kind == "regex":
        return compiler.compile_regex(grammar.text)
    return compiler.compile_grammar(grammar.text)


def _refusal(grammar: Grammar, reason: str) -> ConfigError:
    return ConfigError(
        f"expected a {_NAMES[grammar.kind]} that xgrammar takes, got {quoted(grammar.text)}: "
        f"{reason}: mend it"
    )
