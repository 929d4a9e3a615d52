"""Text in, text out: a model with its tokenizer, answers whole or in pieces (extra ``hf``).

Names are imported on first use.
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
