"""An OpenAI-compatible server over one engine (extra ``serve``), on the server of transformers."""

from __future__ import annotations

__all__: list[str] = []
