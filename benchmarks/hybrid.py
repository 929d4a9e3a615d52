"""Generated tokens per second of hybrid models: our engine beside `generate` of transformers.

    python benchmarks/hybrid.py [--model lfm2-350m] [--requests 10] [--trace FILE] [--rounds 3]

A checkpoint of drawn weights with the shape of a published one, and the first requests of the
trace, each with its own output length, greedy. `generate` serves one request at a time, and padded
batches in the order of arrival; continuous batching of transformers refuses these models. All run
in one process, in turns; medians over the rounds, compile and warmup excluded. The prompts of every
round are new. In bfloat16 answers of drawn weights differ where logits nearly tie, those of padded
batches too; in float32 they are equal.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from peers.workers.batch import generate_batch
from transformers import GraniteMoeHybridConfig, Lfm2Config, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from compiled_attn import workloads as demand
from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from graphs.report.surroundings import machine

TRACE = Path(__file__).resolve().parents[2] / "shared/traces/azure2023_conv.csv"
Requests = list[tuple[list[int], int]]
Serve = Callable[[Requests], list[list[int]]]


def lfm2() -> PreTrainedConfig:
    """LiquidAI/LFM2-350M: ten short convolutions, six layers of attention."""
    return Lfm2Config(
        vocab_size=65_536, hidden_size=1024, intermediate_size=6656, num_hidden_layers=16,
        num_attention_heads=16, num_key_value_heads=8, full_attn_idxs=[2, 5, 8, 10, 12, 14],
    )  # fmt: skip


def granite() -> PreTrainedConfig:
    """ibm-granite/granite-4.0-h-350m: 28 layers of Mamba 2, four of attention."""
    attention = {10, 13, 17, 27}
    return GraniteMoeHybridConfig(
        vocab_size=100_352, hidden_size=768, intermediate_size=2048, shared_intermediate_size=2048,
        num_hidden_layers=32, num_attention_heads=12, num_key_value_heads=4, num_local_experts=0,
        num_experts_per_tok=0, mamba_n_heads=48, mamba_d_head=32, mamba_d_state=128,
        mamba_n_groups=1, mamba_expand=2, position_embedding_type="nope", tie_word_embeddings=True,
        max_position_embeddings=32_768, attention_multiplier=1 / 64, embedding_multiplier=12.0,
        residual_multiplier=0.246, logits_scaling=3.0,
        layer_types=["attention" if n in attention else "mamba" for n in range(32)],
    )  # fmt: skip


MODELS = {"lfm2-350m": lfm2, "granite-4.0-h-350m": granite}


def drawn(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """A model of drawn weights, equal in every call."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name](), dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    model.set_attn_implementation("sdpa")
    return model.requires_grad_(False)


def ours(model: PreTrainedModel, tokens: int, context: int) -> Serve:
    """A warm engine of the inductor backend."""
    engine = Engine(
        model,
        EngineConfig(max_tokens_per_step=tokens, max_seqs=16, context=context, store=True),
    )
    seconds = engine.warmup().elapsed_seconds
    states = engine.report().states
    print(f"# ours: {len(engine.sizing.buckets)} graphs, warmup {seconds:.1f} s, states {states}")

    def serve(requests: Requests) -> list[list[int]]:
        params = [SamplingParams(max_new_tokens=new, ignore_eos=True) for _, new in requests]
        results = engine.generate([prompt for prompt, _ in requests], params)
        return [list(each.tokens) for each in sorted(results, key=lambda each: each.index)]

    return serve


def in_batches(model: PreTrainedModel, size: int) -> Serve:
    """`model.generate` with left padding; a batch ends with its longest request."""

    def serve(requests: Requests) -> list[list[int]]:
        found: list[list[int]] = []
        for start in range(0, len(requests), size):
            batch = requests[start : start + size]
            width = max(len(prompt) for prompt, _ in batch)
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in batch])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in batch])
            most = max(new for _, new in batch)
            out = model.generate(ids, attention_mask=mask, max_new_tokens=most, do_sample=False)
            rows = out[:, width:].tolist()
            found += [row[:new] for row, (_, new) in zip(rows, batch, strict=True)]
        return found

    return serve


def refusal(model: PreTrainedModel, tokens: int) -> str:
    """What continuous batching of transformers says of the model."""
    try:
        generate_batch(model, tokens)([[1, 2, 3]], [2])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "serves it"


def requests_of(arrivals: Sequence[demand.Arrival], vocab: int, seed: int) -> Requests:
    """The requests of a round."""
    prompts = demand.prompts(arrivals, vocab, seed=seed)
    return [(list(p), a.output_tokens) for p, a in zip(prompts, arrivals, strict=True)]


def main() -> None:
    """Prints tokens/s of each, and how much faster ours is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="lfm2-350m")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8, help="requests of a padded batch")
    parser.add_argument("--tokens", type=int, default=512, help="tokens in a step at most")
    parser.add_argument("--context", type=int, default=1536)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if not options.trace.is_file():
        print(f"# {options.trace}: skipped, no such file (--trace names another)")
        return
    dtype = getattr(torch, options.dtype)
    arrivals = demand.read_trace(options.trace, options.requests)
    plain, vocab = drawn(options.model, dtype), MODELS[options.model]().vocab_size
    weights = sum(each.numel() for each in plain.parameters()) / 1e6
    print(
        f"# {machine()['cpu']}, {options.threads} threads, torch {torch.__version__}, "
        f"{options.dtype}, {options.model} ({weights:.0f} million drawn weights)\n"
        f"# {options.trace.name}: {len(arrivals)} requests, "
        f"{sum(a.prompt_tokens for a in arrivals)} prompt tokens, "
        f"{sum(a.output_tokens for a in arrivals)} to generate"
    )
    print(f"# generate_batch: {refusal(drawn(options.model, dtype), options.tokens)}", flush=True)
    systems = {
        "ours": ours(drawn(options.model, dtype), options.tokens, options.context),
        "generate": in_batches(plain, 1),
        f"generate, batches of {options.batch}": in_batches(plain, options.batch),
    }
    rates: dict[str, list[float]] = {name: [] for name in systems}
    tokens = sum(a.output_tokens for a in arrivals)
    texts: dict[str, list[list[int]]] = {}
    for number in range(options.rounds):
        requests = requests_of(arrivals, vocab, number)
        for name, system in systems.items():
            started = time.perf_counter()
            with torch.no_grad():
                texts[name] = system(requests)
            rates[name].append(tokens / (time.perf_counter() - started))
        found = ", ".join(f"{name} {values[-1]:.1f}" for name, values in rates.items())
        print(f"# round {number + 1}, tokens/s: {found}", flush=True)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, values in rates.items():
        same = sum(a == b for a, b in zip(texts["generate"], texts[name], strict=True))
        print(
            f"{name:24} {medians[name]:7.1f} tokens/s (min {min(values):.1f}, max "
            f"{max(values):.1f})  ours is {medians['ours'] / medians[name]:.2f}x, {same} of "
            f"{len(arrivals)} answers as by generate"
        )


if __name__ == "__main__":
    main()
