"""Adds and removes adapters over HTTP, by the paths and fields that vLLM has for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from compiled_attn.errors import AdapterError, ConfigError
from compiled_attn.models.adapters import read_adapter
from compiled_attn.serve.http_errors import RequestError
from compiled_attn.serve.model import ServedModel
from compiled_attn.serve.parse import parse_body
from graphs.errors import quoted

__all__ = ["add_adapter_routes"]

Seen = TypeVar("Seen")


def add_adapter_routes(app: FastAPI, model: ServedModel) -> None:
    """Adds ``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``.

    Whoever may use them makes the server read folders of its machine.
    """

    @app.post("/v1/load_lora_adapter")
    async def load(request: Request) -> JSONResponse:
        name, path = _fields(await request.body(), "lora_name", "lora_path")
        if name == model.name:
            raise RequestError(f"expected another name than the model's, got {quoted(name)}")
        adapter = await _called(lambda: read_adapter(Path(path)))
        await _called(lambda: model.engine.call(lambda own: own.adapters.add(name, adapter)))
        return JSONResponse({"loaded": name})

    @app.post("/v1/unload_lora_adapter")
    async def unload(request: Request) -> JSONResponse:
        (name,) = _fields(await request.body(), "lora_name")
        await _called(lambda: model.engine.call(lambda own: own.adapters.remove(name)), status=404)
        return JSONResponse({"unloaded": name})


async def _called(function: Callable[[], Seen], status: int = 400) -> Seen:
    try:
        return await asyncio.to_thread(function)
    except (AdapterError, ConfigError) as error:
        raise RequestError(str(error), status) from error


def _fields(body: bytes, *names: str) -> list[str]:
    found = parse_body(body)
    for name in names:
        if not isinstance(found.get(name), str) or not found[name]:
            raise RequestError(f"expected {name} as text, got {quoted(found.get(name))}: give it")
    return [found[name] for name in names]
