"""Replicas of the server on Ray (extra ``ray``), each request sent where its prefix is cached."""

from __future__ import annotations

__all__: list[str] = []
