"""Serves vLLM's engine over JSON lines: one call per line on stdin, its result on stdout.

Runs in vLLM's environment, without this project.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


class Calls:
    """The calls that `VllmCpu` sends, by name."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import EngineArgs, LLMEngine

        self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self.core = self.engine.engine_core.engine_core

    def submit(self, name: str, prompt: list[int], new: int, salt: str | None, count: int) -> None:
        """Adds a request; vLLM's ``n`` needs a temperature, which ``top_k=1`` makes greedy."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        several = {"n": count, "temperature": 1.0, "top_k": 1}
        params = SamplingParams(
            max_tokens=new, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA,
            **(several if count > 1 else {"temperature": 0.0}),
        )  # fmt: skip
        given = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
        self.engine.add_request(name, given, params)

    def step(self) -> list[tuple[str, int, list[int]]]:
        """Returns new tokens by request and continuation."""
        results = self.engine.step() if self.engine.has_unfinished_requests() else []
        return [
            (r.request_id, each.index, [*each.token_ids]) for r in results for each in r.outputs
        ]

    def abort(self, name: str) -> None:
        """Aborts all continuations."""
        self.engine.abort_request([name])

    def preempt(self) -> None:
        """Preempts all running requests, and empties the prefix cache."""
        self.engine.reset_prefix_cache(reset_running_requests=True)

    def usage(self) -> dict[str, Any]:
        """Counts blocks of the pool (without the null block), free blocks and open requests."""
        scheduler = self.core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        open_ = len(scheduler.requests) + len(scheduler.running) + len(scheduler.waiting)
        return {"total": pool.num_gpu_blocks - 1, "free": pool.get_num_free_blocks(), "open": open_}

    def reset(self) -> bool:
        """Empties the prefix cache of an idle engine."""
        return not self.usage()["open"] and bool(self.engine.reset_prefix_cache())


def main() -> None:
    """Answers calls until stdin closes; vLLM's own output goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    calls: Calls | None = None
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            if calls is None:
                calls, result = Calls(arguments[0]), None
            else:
                result = getattr(calls, name)(*arguments)
            answer = {"result": result}
        except Exception as error:
            answer = {"error": type(error).__name__, "message": str(error)[:500]}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
