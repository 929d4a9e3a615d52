"""The setting ``speculate``: where drafts come from and how long they are at most."""

from __future__ import annotations

import re
from dataclasses import dataclass

from compiled_attn.errors import ConfigError

__all__ = ["LONGEST", "Speculation"]

LONGEST = 16
"""Tokens of a draft at most."""

_SETTING = re.compile(r"(?:ngram|model:(?P<model>.+)):(?P<most>\d{1,3})")


@dataclass(frozen=True, slots=True)
class Speculation:
    """Drafts of at most ``most`` tokens, of a model in a folder, or else of n-grams."""

    most: int
    model: str | None = None

    @staticmethod
    def of(setting: object) -> Speculation | None:
        """Parses the setting; None: no drafts.

        Raises:
            ConfigError: it has another form, or a length outside 1..16.
        """
        if setting is None:
            return None
        found = _SETTING.fullmatch(setting) if isinstance(setting, str) else None
        if found is None or not 1 <= int(found["most"]) <= LONGEST:
            raise ConfigError(
                f"expected speculate as ngram:K or model:DIR:K, drafts of K tokens with K in "
                f"1..{LONGEST}, got {setting!r}: write it as ngram:4"
            )
        return Speculation(int(found["most"]), found["model"])
