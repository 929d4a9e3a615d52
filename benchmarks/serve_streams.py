"""Throughput of many concurrent streams, for the servers of two source trees.

    python benchmarks/serve_streams.py TREE_A TREE_B [--streams 64] [--tokens 128] [--rounds 5]

Starts ``compiled-attn serve`` of each tree with the same model. Rounds alternate, and the server
that is not measured is stopped (SIGSTOP). In a round every stream is one chat of `--tokens` greedy
tokens, read to its end by a client that only counts events. The default model is a tiny random
Llama, whose steps are short: then the server itself takes most of the time. ``--model smollm2``
shows how much of that remains next to a real model.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import torch

COMMAND = "from compiled_attn.cli import main; main()"


def save_tiny_model(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] + '<end>' }}{% endfor %}"
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=272,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


class Server:
    """The server of one tree in a process of its own."""

    def __init__(self, tree: Path, model: str, options: argparse.Namespace) -> None:
        self.tree = tree
        self.rates: list[float] = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        command = [sys.executable, "-c", COMMAND, "serve", model, "--name", "served", "--no-store"]
        command += ["--port", str(self.port), "--dtype", options.dtype]
        command += ["--backend", options.backend, "--max-seqs", str(options.streams)]
        environment = os.environ | {"PYTHONPATH": str(tree)}
        self.process = subprocess.Popen(
            command, env=environment, cwd=tree, start_new_session=True, stderr=subprocess.DEVNULL
        )
        while not self._is_ready():
            if self.process.poll() is not None:
                sys.exit(f"{tree}: the server ended with {self.process.returncode}")
            time.sleep(0.5)

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)

    def run_round(self, streams: int, tokens: int, number: int) -> float:
        """Returns tokens per second of all streams together."""
        selector = selectors.DefaultSelector()
        started = time.perf_counter()
        for stream in range(streams):
            connection = socket.create_connection(("127.0.0.1", self.port))
            body = json.dumps(
                {
                    "model": "served",
                    "messages": [{"role": "user", "content": f"{number} {stream}: a story"}],
                    "max_tokens": tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                    "stream": True,
                }
            ).encode()
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            selector.register(connection, selectors.EVENT_READ, bytearray())
        done = 0
        while selector.get_map():
            for key, _ in selector.select():
                connection, received = key.fileobj, key.data
                assert isinstance(connection, socket.socket)
                if part := connection.recv(1 << 16):
                    received += part
                else:
                    selector.unregister(connection)
                    connection.close()
                    assert b"data: [DONE]" in received[-200:], bytes(received[-500:])
                    done += 1
        assert done == streams
        return streams * tokens / (time.perf_counter() - started)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health"):
                return True
        except (urllib.error.URLError, ConnectionError):
            return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trees", type=Path, nargs=2)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    servers: list[Server] = []
    with tempfile.TemporaryDirectory() as folder:
        if options.model == "tiny":
            save_tiny_model(Path(folder))
        try:
            for tree in options.trees:
                model = folder if options.model == "tiny" else options.model
                servers.append(Server(tree.resolve(), model, options))
                servers[-1].run_round(options.streams, options.tokens, -1)
                servers[-1].signal(signal.SIGSTOP)
            for number in range(options.rounds):
                for server in servers if number % 2 == 0 else reversed(servers):
                    server.signal(signal.SIGCONT)
                    rate = server.run_round(options.streams, options.tokens, number)
                    server.rates.append(rate)
                    server.signal(signal.SIGSTOP)
        finally:
            for server in servers:
                server.signal(signal.SIGKILL)
    cores = os.cpu_count()
    print(
        f"# {platform.machine()}, {cores} cores, {torch.get_num_threads()} threads, "
        f"{options.dtype}, {options.backend}, model {options.model}, {options.streams} streams of "
        f"{options.tokens} tokens, {options.rounds} rounds"
    )
    for server in servers:
        low, high = min(server.rates), max(server.rates)
        median = statistics.median(server.rates)
        print(f"{server.tree}: {median:,.0f} tokens/s (from {low:,.0f} to {high:,.0f})")
    first, second = (statistics.median(server.rates) for server in servers)
    print(f"second over first: {second / first:.2f}x")


if __name__ == "__main__":
    main()
