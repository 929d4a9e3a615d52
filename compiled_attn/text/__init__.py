"""Text in, text out: a model's tokenizer over an engine, answers whole or in pieces (extra ``hf``).

A name is imported when it is first asked for, as in `compiled_attn`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphs.lazy import lazy_names

if TYPE_CHECKING:
    from compiled_attn.text.answer import Answer, AnswerPieces, StopFilter, TextPieces
    from compiled_attn.text.grammars import Grammars
    from compiled_attn.text.llm import LLM
    from compiled_attn.text.tokenizer import Message, Prompt, Tokenizer
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "answer": "Answer AnswerPieces StopFilter TextPieces",
            "grammars": "Grammars",
            "llm": "LLM",
            "tokenizer": "Message Prompt Tokenizer",
        },
    )

__all__ = [
    "LLM",
    "Answer",
    "AnswerPieces",
    "Grammars",
    "Message",
    "Prompt",
    "StopFilter",
    "TextPieces",
    "Tokenizer",
]
