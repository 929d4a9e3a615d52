"""The command ``serve``: a model behind the interface of OpenAI, until a signal ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from compiled_attn.cli.errors import FAILED, INTERRUPTED, UserError, bad_input
from compiled_attn.cli.inputs import dtype_of, refuse_unavailable, tell_conversion
from compiled_attn.cli.options import ServeOptions, settings_of
from compiled_attn.cli.replicas import serve_replicas
from compiled_attn.cli.store import stored_backend
from compiled_attn.engine import EngineConfig
from compiled_attn.models import usable_device
from compiled_attn.text import LLM, Tokenizer
from graphs import BucketEvent, progress_for
from graphs.installation import install_command

if TYPE_CHECKING:
    from compiled_attn.serve.served import Served

__all__ = ["run_serve"]

_PATIENCE = 5.0
"""Seconds that an interrupted warmup may take for the graph that it is at."""


def run_serve(options: ServeOptions) -> int:
    """Serves until a signal ends it; returns the exit code.

    Raises:
        UserError: no such model, or one without a tokenizer, or the address is in use; nothing was
            started.
    """
    try:
        from compiled_attn.serve.served import Served
        from compiled_attn.serve.server import bound
    except ImportError as error:
        raise UserError(
            f"the server needs a package that is not installed: {error}: {install_command('serve')}"
        ) from error
    if options.address is not None and options.replicas is None:
        raise UserError("--address is for --replicas: give both, or none")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with bad_input(), stored_backend(options.backend, None) as backend:
        refuse_unavailable(options)
        tell_conversion(options.model)
        Tokenizer(options.model)  # fails before it listens
        usable_device(options.device)
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        config = EngineConfig(**settings_of(options) | {"backend": backend}, watch_process=True)
        name = options.name or options.model.stem
        listening = bound(options.host, options.port)
        host, port = listening.getsockname()[:2]

        def when_up() -> None:
            _say(f"{name} at http://{host}:{port}/v1")

        if options.replicas is None:
            _run_to_the_end(Served(name, partial(_load, options, config)), listening, when_up)
        else:
            serve_replicas(options, listening, when_up, _say)
    return 0


def _run_to_the_end(served: Served, listening: socket.socket, when_up: Callable[[], None]) -> None:
    """Serves, and leaves no thread inside of torch, which aborts when the interpreter ends then."""
    from compiled_attn.serve.server import run

    code = FAILED
    try:
        run(served, listening, when_up)
        code = 0
    except KeyboardInterrupt:
        code = INTERRUPTED
        raise
    except SystemExit:  # SIGTERM
        code = 0
        raise
    finally:
        is_over = False
        with contextlib.suppress(KeyboardInterrupt, SystemExit):  # a second one: at once
            is_over = served.give_up(_PATIENCE)
        if not is_over:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _load(
    options: ServeOptions, config: EngineConfig, progress: Callable[[BucketEvent], None]
) -> LLM:
    shown: Any = progress_for(sys.stderr)

    def told(event: BucketEvent) -> None:
        progress(event)
        shown(event)

    llm = LLM(options.model, config, dtype=dtype_of(options), device=options.device, progress=told)
    _say("ready")
    return llm


def _say(text: str) -> None:
    print(f"compiled-attn: {text}", file=sys.stderr, flush=True)
