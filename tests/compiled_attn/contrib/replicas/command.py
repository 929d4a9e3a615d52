"""Runs ``compiled-attn serve --replicas`` in a subprocess."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[4]
LIMITS = {"max_seqs": 8, "block_size": 8, "num_blocks": 200, "max_graphs": 6}


class Command:
    """The command at a free port, with its output in the file ``log``."""

    def __init__(
        self,
        folder: Path,
        log: Path,
        *more: str,
        replicas: int = 2,
        module: str = "compiled_attn",
        **environment: str,
    ) -> None:
        limits = [f"--{name.replace('_', '-')}={size}" for name, size in LIMITS.items()]
        command = [sys.executable, "-m", module, "serve", str(folder), "--port=0"]
        command += ["--backend=eager", f"--replicas={replicas}", "--name=tiny", *limits, *more]
        settings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment
        self._log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, env=settings, stdout=file, stderr=file, start_new_session=True
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    @property
    def url(self) -> str:
        return self.output.split(" at ")[1].split("/v1")[0]

    def get(self, path: str, body: dict | None = None) -> str:
        """The response; with a body, to a POST."""
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, content, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.read().decode()

    def complete(self, prompt: str) -> str:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4}
        return json.loads(self.get("/v1/completions", body))["choices"][0]["text"]

    def wait(self, line: str, times: int = 1, seconds: float = 240) -> None:
        until = time.monotonic() + seconds
        while self.output.count(line) < times:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < until, self.output
            time.sleep(0.05)

    def replicas(self) -> list[int]:
        """Process ids of the replicas."""
        return [each["process"] for each in json.loads(self.get("/health"))["replicas"]]

    def metric(self, name: str) -> float:
        lines = self.get("/metrics").splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def processes(self) -> list[int]:
        """All descendant processes."""
        found, parents = {self.process.pid}, _parents()
        while more := {each for each, parent in parents.items() if parent in found} - found:
            found |= more
        return sorted(found - {self.process.pid})

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


def still_running(processes: list[int], seconds: float = 30) -> list[int]:
    """The processes that run after a timeout."""
    until = time.monotonic() + seconds
    while (left := sorted({*processes} & _parents().keys())) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def _parents() -> dict[int, int]:
    """The parent of each process that runs."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just exited
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state not in ("Z", "X"):
                found[int(path.parent.name)] = int(parent)
    return found
