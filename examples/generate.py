"""Continuous batching: capture once, serve requests, never compile again.

    python examples/generate.py [--model DIR] [--backend eager]

Without a model, a small Llama with random weights is built; eager starts at once, inductor (the
default) compiles each graph first.
"""

from __future__ import annotations

import argparse
import sys

from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.models import default_model, load_model
from graphs import progress_for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="directory of a Hugging Face causal language model")
    parser.add_argument("--backend", default="inductor")
    options = parser.parse_args()

    model = load_model(options.model) if options.model else default_model()
    config = EngineConfig(context=256, max_seqs=4, max_graphs=8, backend=options.backend)
    engine = Engine(model, config)
    engine.warmup(progress_for(sys.stderr))
    prompts = [list(range(1, length)) for length in (5, 40, 12, 90, 25)]  # token ids
    for result in engine.generate(prompts, SamplingParams(max_new_tokens=12)):
        print(f"request {result.index} ({result.finish_reason}): {result.tokens}")
    report = engine.report()
    print(
        f"{report.graphs} graphs, {report.steps} steps, {report.tokens_per_second} tokens/s, "
        f"{report.compiles_after_warmup} compiles after warmup"
    )


if __name__ == "__main__":
    main()
