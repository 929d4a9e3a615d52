"""What adapters cost: a decode step of 16 requests, each with its own, over one without any.

    PYTHONPATH=benchmarks python benchmarks/adapters.py [--threads] [--rounds] [--large] [--peft]

Both engines serve the same weights in bfloat16 and take turns. Drawn adapters: their numbers do
not change the time. ``--large`` adds a drawn model of 1.1 billion parameters, ``--peft`` a step of
peft's own `generate` for 16 rows with 16 adapters (``adapter_names``), over one of ours.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.models import load_model
from compiled_attn.models.adapters import Adapter, LoraWeight
from compiled_attn.models.load import plain_folder
from graphs.report.surroundings import machine

_ADAPTERS, _RANK, _PROMPT, _STEPS = 16, 16, 128, 32
_TARGETS: dict[str, tuple[str, ...]] = {
    "q_proj and v_proj": ("q_proj", "v_proj"),
    "all linears": (),
}


def large() -> Any:
    """A drawn Llama of 1.1 billion parameters."""
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=4096,
        tie_word_embeddings=True,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def engine(model: Any, adapters: int, targets: Sequence[str]) -> Engine:
    """A warm engine, with room for so many adapters."""
    made = Engine(
        model,
        EngineConfig(
            max_seqs=_ADAPTERS,
            max_tokens_per_step=256,
            context=512,
            max_graphs=4,
            store=True,
            max_adapters=adapters,
            max_adapter_rank=_RANK,
            adapter_targets=tuple(targets),
        ),
    )
    made.warmup()
    return made


def drawn(served: Engine) -> Iterator[Adapter]:
    """Adapters of drawn numbers for all layers that an engine adapts."""
    assert served.executor.adapters is not None
    for number in range(_ADAPTERS):
        weights = {
            name: LoraWeight(
                torch.randn(_RANK, layer.in_features) / 100,
                torch.randn(layer.out_features, _RANK) / 100,
                1.0,
            )
            for name, layer in served.executor.adapters.layers.items()
        }
        yield Adapter(f"drawn {number}", weights)


def step_seconds(served: Engine, names: Sequence[str | None]) -> float:
    """Median seconds of a decode step of a request for each name."""
    for number, name in enumerate(names):
        prompt = [3 + (7 * number + place) % 1000 for place in range(_PROMPT)]
        sampling = SamplingParams(max_new_tokens=_STEPS + 8, ignore_eos=True, adapter=name)
        served.submit(prompt, sampling, salt=str(time.perf_counter()))
    seconds = []
    while served.has_work:
        start = time.perf_counter()
        events = served.step()
        if len(events) == len(names):
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def peft_seconds(targets: Sequence[str]) -> float:
    """Mean seconds of a decode step of peft, with the attention that transformers chooses."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(plain_folder("smollm2"), dtype=torch.bfloat16)
    config = LoraConfig(r=_RANK, target_modules=list(targets) or "all-linear")
    model = get_peft_model(base, config, adapter_name="a0", autocast_adapter_dtype=False).eval()
    for number in range(1, _ADAPTERS):
        model.add_adapter(f"a{number}", config)
    ids = torch.arange(_ADAPTERS * _PROMPT).reshape(_ADAPTERS, _PROMPT) % 1000 + 3
    names = [f"a{number}" for number in range(_ADAPTERS)]

    def seconds(tokens: int) -> float:
        start = time.perf_counter()
        with torch.no_grad():
            model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), adapter_names=names,
                min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False,
            )  # fmt: skip
        return time.perf_counter() - start

    seconds(2)
    return (seconds(_STEPS + 1) - seconds(1)) / _STEPS


def main() -> None:
    """Prints a line for each model and choice of layers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--peft", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"# {machine()['cpu']}, {options.threads} threads, bfloat16, torch {torch.__version__}")
    print(f"# 16 requests of {_PROMPT} + {_STEPS} tokens; {_ADAPTERS} adapters of rank {_RANK}")
    makes = {"SmolLM2-135M": lambda: load_model("smollm2", torch.bfloat16)}
    if options.large:
        makes["drawn, 1.1 billion"] = large
    for model, make in makes.items():
        plain = engine(make(), 0, ())
        for layers, targets in _TARGETS.items():
            served = engine(make(), _ADAPTERS, targets)
            for number, adapter in enumerate(drawn(served)):
                served.adapters.add(str(number), adapter)
            cases = {
                "none": (plain, [None] * _ADAPTERS),
                "unused": (served, [None] * _ADAPTERS),
                "one": (served, ["0"] * _ADAPTERS),
                "all": (served, [str(number) for number in range(_ADAPTERS)]),
            }
            seconds: dict[str, list[float]] = {name: [] for name in cases}
            for _ in range(options.rounds):
                for name, case in cases.items():
                    seconds[name].append(step_seconds(*case))
            medians = {name: statistics.median(found) for name, found in seconds.items()}
            ratios = ", ".join(
                f"{name} {medians[name] / medians['none']:.2f}" for name in ("unused", "one", "all")
            )
            print(
                f"{model}, {layers}: {1000 * medians['none']:.1f} ms a step; {ratios}", flush=True
            )
            served.executor.close()
            if options.peft and model == "SmolLM2-135M":
                peft = peft_seconds(targets)
                ratio = peft / medians["all"]
                print(f"  peft {1000 * peft:.1f} ms a step, {ratio:.1f} times ours", flush=True)
        plain.executor.close()


if __name__ == "__main__":
    main()
