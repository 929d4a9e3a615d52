"""The salt of a request, from its header: only requests of equal salt share cached blocks."""

from __future__ import annotations

from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["HEADER", "Salted", "current_salt"]

HEADER = "X-Cache-Salt"
"""The header that names a tenant, or whoever else must not learn what others asked."""

_salt: ContextVar[str | None] = ContextVar("salt", default=None)


def current_salt() -> str | None:
    """The salt of the request that is handled now."""
    return _salt.get()


class Salted:
    """Middleware that keeps each request's salt while it is handled."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        given = dict(scope.get("headers", ())).get(HEADER.lower().encode())
        token = _salt.set(None if given is None else given.decode("latin-1"))
        try:
            await self._app(scope, receive, send)
        finally:
            _salt.reset(token)
