"""The command ``serve``: what it refuses before it listens, and how a signal ends it."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'serve'")

import openai

from tests.compiled_attn.cli.commands import assert_refused
from tests.slow import slow_but

SMALL = (
    *("--backend", "eager", "--max-tokens-per-step", "32", "--max-seqs", "2"),
    *("--block-size", "8", "--num-blocks", "80", "--max-graphs", "4"),
)


def test_a_model_without_a_tokenizer_is_refused(command, model_dir):
    assert_refused(command("serve", model_dir, *SMALL), "it has no tokenizer")


def test_a_port_in_use_is_refused(command, chat_dir):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        shown = command("serve", chat_dir, "--port", port, *SMALL)
    assert_refused(shown, f"cannot listen at 127.0.0.1:{port}", "--port")


# That an interrupt ends a command with 130 is tested of `run` and `chat` too.
@pytest.mark.parametrize(
    ("number", "code"),
    slow_but(((signal.SIGTERM, 0),), ((signal.SIGINT, 130), (signal.SIGTERM, 0))),
)
def test_a_signal_ends_a_warmup(chat_dir, number, code):
    with started(chat_dir, until="warmup 1/", program=_SLOWLY) as (process, _):
        process.send_signal(number)
        _, shown = process.communicate(timeout=60)
    assert process.returncode == code, shown
    assert "terminate" not in shown and "Traceback" not in shown


_PROGRAM = "from compiled_attn.cli import main; main()"
# Each capture takes long enough for a signal to come before the next.
_SLOWLY = f"""
import time
from graphs.backends.eager import EagerBackend
capture = EagerBackend.capture
EagerBackend.capture = lambda *args, **named: (time.sleep(0.3), capture(*args, **named))[1]
{_PROGRAM}
"""


def _take_interrupts() -> None:
    """What a shell starts in the background ignores them, as does each process of its own."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def started(
    chat_dir: Path, until: str = "compiled-attn: ready", program: str = _PROGRAM
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command in a process of its own that has said something, and its address."""
    arguments = ["serve", str(chat_dir), "--name", "tiny", "--port", "0", *SMALL]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_take_interrupts,
    )
    assert process.stderr is not None
    url = ""
    try:
        for line in process.stderr:
            url = m[1] if (m := re.match(r"compiled-attn: tiny at (\S+)", line)) else url
            if line.startswith(until):
                break
        yield process, url
    finally:
        process.kill()
        process.wait()


# The other tests have SIGTERM.
@pytest.mark.parametrize("number", slow_but((signal.SIGINT,), (signal.SIGINT, signal.SIGTERM)))
def test_a_drain_shows_in_health_and_a_second_signal_ends_it(chat_dir, number):
    with started(chat_dir) as (process, url):
        threading.Thread(target=process.stderr.read, daemon=True).start()
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        stream = client.completions.create(
            model="tiny", prompt="the moon", max_tokens=240, stream=True, temperature=0, n=100
        )
        next(iter(stream))
        process.send_signal(number)
        shown = ""
        while "draining" not in shown:
            try:
                urllib.request.urlopen(url.replace("/v1", "/health"))
            except urllib.error.HTTPError as error:
                shown = error.read().decode()
        assert "draining, 1 requests open" in shown
        with pytest.raises(openai.InternalServerError, match="one that stops"):
            client.completions.create(model="tiny", prompt="x", max_tokens=1)
        process.send_signal(number)
        assert process.wait(timeout=10) == 128 + number  # the stream would take longer


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--api-key", ""), "printable ASCII"),
        (("--max-body", "x"), "expected max_body in bytes"),
        (("--ssl-certfile", "a.pem"), "belong together"),
        (("--ssl-certfile", "/no.pem", "--ssl-keyfile", "/no.pem"), "cannot use the certificate"),
        (("--no-store", "--store", "x"), "choose whether to use a store"),
        (("--access-log", "--replicas", "2"), "leave it or --replicas out"),
        (("--adapter", "sql"), "expected --adapter NAME=DIR, got 'sql'"),
        (("--adapter", "sql=/nowhere"), "adapter /nowhere: expected a directory"),
        (("--name", "sql", "--adapter", "sql=/nowhere"), "'sql' is in use"),
        (("--adapter", "sql=a", "--replicas", "2"), "--adapter is for one process"),
        (("--allow-adapter-loading",), "needs --max-adapters"),
    ],
)
def test_options_that_cannot_work_are_refused(command, chat_dir, options, words):
    assert_refused(command("serve", chat_dir, *options, *SMALL), words)


def test_a_signal_lets_what_was_asked_be_answered_and_takes_nothing_new(chat_dir):
    with started(chat_dir) as (process, url):
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        stream = client.completions.create(
            model="tiny",
            prompt="the moon",
            max_tokens=200,
            stream=True,
            temperature=0,
            stream_options={"include_usage": True},
        )
        chunks = [next(iter(stream))]
        process.send_signal(signal.SIGTERM)
        threading.Thread(target=process.stderr.read, daemon=True).start()
        *chunks, usage = [*chunks, *stream]
        assert chunks[-1].choices[0].finish_reason == "length"
        assert usage.usage.completion_tokens == 200
        assert process.wait(timeout=60) == 0
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(f"{url}/models")
