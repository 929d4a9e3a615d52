"""The command ``serve``: an OpenAI-compatible server, until a signal ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compiled_attn.bundle import Bundle, BundleMisfit
from compiled_attn.cache.quantisation import KV_DTYPES
from compiled_attn.cli.errors import FAILED, INTERRUPTED, UserError, bad_input
from compiled_attn.cli.inputs import dtype_of, refuse_unavailable, tell_conversion
from compiled_attn.cli.options import ServeOptions
from compiled_attn.cli.replicas import serve_replicas, serving_backend, serving_config
from compiled_attn.engine import EngineConfig
from compiled_attn.engine.config import byte_size
from compiled_attn.models import usable_device
from compiled_attn.models.adapters import Adapter, read_adapter
from compiled_attn.ops.paged_attention import build_ahead
from compiled_attn.text import LLM, Tokenizer
from graphs import BucketEvent, progress_for
from graphs.installation import install_command

if TYPE_CHECKING:
    from compiled_attn.serve.model import ServedModel
    from compiled_attn.serve.settings import ServerSettings

__all__ = ["run_serve"]

_CANCEL_SECONDS = 5.0
"""Time for an interrupted warmup to finish the graph that is being captured."""


def run_serve(options: ServeOptions, bundle: Bundle | None = None) -> int:
    """Serves until a signal ends it; returns the exit code. Raises UserError for bad input.

    ``bundle``: that of the options, opened; None where the options have none or ``or_compile``.
    """
    try:
        from compiled_attn.serve.model import ServedModel
        from compiled_attn.serve.server import listen
    except ImportError as error:
        raise UserError(
            f"the server needs a package that is not installed: {error}: {install_command('serve')}"
        ) from error
    if options.address is not None and options.replicas is None:
        raise UserError("--address is for --replicas: give both, or none")
    if options.access_log and options.replicas is not None:
        raise UserError("--access-log is for one process: leave it or --replicas out")
    if options.bundle is not None and options.replicas is not None:
        raise UserError("--bundle is for one process: leave it or --replicas out")
    if options.adapter and (options.replicas is not None or options.bundle is not None):
        raise UserError("--adapter is for one process without a bundle: leave one of them out")
    if options.allow_adapter_loading and not (options.max_adapters or options.adapter):
        raise UserError("--allow-adapter-loading needs --max-adapters: give both, or none")
    if options.or_compile and options.bundle is None:
        raise UserError("--or-compile is for --bundle: give both, or none")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    compiles = options.bundle is None or options.or_compile
    backing = serving_backend(options) if compiles else contextlib.nullcontext(options.backend)
    with bad_input(), backing as backend:
        http = _http_settings(options)
        name = options.name or (options.bundle or options.model).stem
        if options.bundle is not None and bundle is None:
            with contextlib.suppress(BundleMisfit):
                bundle = Bundle(options.bundle)
        if bundle is None:
            refuse_unavailable(options)
            if options.device == "cpu":
                build_ahead(KV_DTYPES.get(options.kv_dtype, dtype_of(options)))
            tell_conversion(options.model)
            Tokenizer(options.model)  # fails before it listens
            usable_device(options.device)
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        config = serving_config(options, backend) if compiles else None
        adapters = _adapters_of(options, name)
        listening = listen(options.host, options.port)
        host, port = listening.getsockname()[:2]

        scheme = "http" if http.ssl_certfile is None else "https"

        def when_up() -> None:
            _say(f"{name} at {scheme}://{host}:{port}/v1")

        if options.replicas is None:
            model = ServedModel(
                name, partial(_load, options, config, bundle or options.bundle, adapters)
            )
            _run_to_the_end(model, listening, when_up, http)
        else:
            serve_replicas(options, listening, when_up, _say, http)
    return 0


def _http_settings(options: ServeOptions) -> ServerSettings:
    from compiled_attn.serve.settings import ServerSettings

    if (key := options.api_key) is not None and not (key.isascii() and key.isprintable() and key):
        raise UserError("expected an API key of printable ASCII characters: choose another")
    if (options.ssl_certfile is None) != (options.ssl_keyfile is None):
        raise UserError("--ssl-certfile and --ssl-keyfile belong together: give both, or none")
    certificate, key_file = options.ssl_certfile, options.ssl_keyfile
    if certificate is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(certificate, key_file, password="")
        except OSError as error:  # of SSL too
            raise UserError(
                f"cannot use the certificate {certificate} with the key {key_file}: {error}: give "
                "PEM files that belong together"
            ) from error
    return ServerSettings(
        max_body=byte_size("max_body", options.max_body),
        api_key=key,
        cors_origins=tuple(options.cors_origin or ()),
        access_log=options.access_log,
        adapter_loading=options.allow_adapter_loading,
        ssl_certfile=certificate,
        ssl_keyfile=key_file,
    )


def _adapters_of(options: ServeOptions, served: str) -> dict[str, Adapter] | None:
    """Reads the adapters, before the server listens; None: there are none."""
    found: dict[str, Adapter] = {}
    for given in options.adapter or ():
        name, _, folder = given.partition("=")
        if not name or not folder:
            raise UserError(f"expected --adapter NAME=DIR, got {given!r}: name a folder")
        if name == served or name in found:
            raise UserError(f"expected another name in --adapter {given!r}: {name!r} is in use")
        found[name] = read_adapter(folder)
    return found or None


def _run_to_the_end(
    model: ServedModel, listening: socket.socket, when_up: Callable[[], None], http: ServerSettings
) -> None:
    # A thread inside torch would abort the process when the interpreter ends.
    from compiled_attn.serve.server import run

    code = FAILED
    try:
        run(model, listening, when_up, http)
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
            is_over = model.cancel_start(_CANCEL_SECONDS)
        if not is_over:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _load(
    options: ServeOptions,
    config: EngineConfig | None,
    bundle: Path | Bundle | None,
    adapters: Mapping[str, Adapter] | None,
    progress: Callable[[BucketEvent], None],
) -> LLM:
    shown: Any = progress_for(sys.stderr)

    def on_bucket(event: BucketEvent) -> None:
        progress(event)
        shown(event)

    own: Any = {}
    if config is not None:
        own = {"model": options.model, "config": config, "dtype": dtype_of(options)}
        own["device"] = options.device
    llm = LLM(**own, bundle=bundle, adapters=adapters, progress=on_bucket)
    _say("ready")
    return llm


def _say(text: str) -> None:
    print(f"compiled-attn: {text}", file=sys.stderr, flush=True)
