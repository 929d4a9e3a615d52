"""Settings of the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["MAX_BODY", "ServerSettings"]

MAX_BODY = 4 * 2**20
"""Default limit of a request body, in bytes."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How the server treats HTTP requests.

    Args:
        max_body: limit of a request body, in bytes; larger ones get 413 before they are parsed.
        api_key: that requests must carry as ``Authorization: Bearer``; None: none is needed.
        cors_origins: origins whose pages may read answers; ``*`` allows all.
        adapter_loading: serve ``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``.
        access_log: write one JSON line to stdout when a request ends.
        ssl_certfile, ssl_keyfile: PEM files for HTTPS; None: HTTP.
    """

    max_body: int = MAX_BODY
    api_key: str | None = field(default=None, repr=False)
    cors_origins: tuple[str, ...] = ()
    adapter_loading: bool = False
    access_log: bool = False
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
