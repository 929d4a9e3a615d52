"""Stream tokens: one greedy request, one sampled, one that is aborted.

python examples/stream.py [--backend eager]
"""

from __future__ import annotations

import argparse
import sys

from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.models import default_model
from graphs import progress_for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="inductor")
    options = parser.parse_args()

    config = EngineConfig(context=256, max_seqs=4, max_graphs=8, backend=options.backend)
    engine = Engine(default_model(), config)
    engine.warmup(progress_for(sys.stderr))

    prompts = [[11, 12, 13], [21, 22, 23, 24]]
    sampling = [
        SamplingParams(max_new_tokens=8),
        SamplingParams(max_new_tokens=8, temperature=0.8, top_k=50, top_p=0.95, seed=1),
    ]
    for event in engine.stream(prompts, sampling):
        print(f"request {event.index}: {event.token}", flush=True)
        if event.result is not None:
            print(f"request {event.index}: done, {event.result.tokens}")

    endless = engine.stream([[31, 32]], SamplingParams(max_new_tokens=200))
    for count, event in enumerate(endless, start=1):
        if count == 5:
            endless.close()  # aborts the request and frees its blocks
            print(f"request {event.request_id}: aborted, {engine.pool.stats().used} blocks in use")


if __name__ == "__main__":
    main()
