"""The text of tokens that come one by one, in pieces that end with a whole character.

A character may take several tokens, and what a token reads as may depend on the one before it, as
the space at the beginning of a text does. So each token is decoded together with those of the piece
before it, and a piece is what that adds (as in text-generation-inference and vLLM).
"""

from __future__ import annotations

from compiled_attn.text.tokenizer import Tokenizer

__all__ = ["TextPieces"]


class TextPieces:
    """Decodes tokens as they come; all pieces together are the text of all tokens.

    Args:
        tokenizer: that of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._told: list[int] = []  # of the last piece, which the next tokens are decoded with
        self._open: list[int] = []

    def put(self, token: int) -> str:
        """What the token adds to the text; empty while a character is not whole yet."""
        if token in self._tokenizer.special:
            return ""
        self._open.append(token)
        piece = self._piece()
        if not piece or not self._tokenizer.is_settled(self._open, piece):
            return ""
        self._told, self._open = self._open, []
        return piece

    def rest(self) -> str:
        """What is left when no token follows, such as half a character (U+FFFD)."""
        return self._piece()

    def _piece(self) -> str:
        told = self._tokenizer.decode(self._told)
        return self._tokenizer.decode([*self._told, *self._open])[len(told) :]
