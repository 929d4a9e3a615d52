"""Policy gradient whose sampler and scorer agree in every bit of a log-probability.

    python examples/rl_scores.py [--model DIR] [--steps 5] [--requests 8] [--tokens 32]

The engine samples continuations, `Scorer` computes the log-probabilities of their tokens again from
other weights of the same values, and a plain model of transformers is trained by REINFORCE: the
reward is the share of tokens that are in a set. Then both get the new weights.
"""

from __future__ import annotations

import argparse

import torch

from compiled_attn import Scorer
from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.models import load_model, plain_folder

PROMPTS = ([1, 2, 3, 4], [5, 6, 7], [8, 9])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="directory of a model, or smollm2")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rate", type=float, default=0.02)
    options = parser.parse_args()

    folder = plain_folder(options.model)
    config = EngineConfig(same_bits=True, max_seqs=8, context=256, store=True, max_graphs=8)
    trained = load_model(folder).requires_grad_(True)
    sampling, scoring = load_model(folder), load_model(folder)
    engine, scorer = Engine(sampling, config), Scorer(scoring, config)
    engine.warmup()
    optimizer = torch.optim.SGD(trained.parameters(), lr=options.rate)
    prompts = [[*PROMPTS[index % len(PROMPTS)]] for index in range(options.requests)]

    for step in range(options.steps):
        params = [
            SamplingParams(
                max_new_tokens=options.tokens, temperature=1.0, seed=step * 1000 + index,
                logprobs=0, ignore_eos=True,
            )
            for index in range(len(prompts))
        ]  # fmt: skip
        # The salt hides cached keys of earlier weights.
        results = [*engine.generate(prompts, params, in_order=True, salt=str(step))]
        difference, rewards, losses = 0.0, [], []
        for prompt, result in zip(prompts, results, strict=True):
            sampled = torch.tensor([each.logprob for each in result.logprobs], dtype=torch.float64)
            scored = scorer.score([*prompt, *result.tokens])[len(prompt) - 1 :]
            difference = max(difference, (sampled - scored).abs().max().item())
            rewards.append(sum(token % 2 for token in result.tokens) / len(result.tokens))
        mean = sum(rewards) / len(rewards)
        for prompt, result, reward in zip(prompts, results, rewards, strict=True):
            tokens = torch.tensor([[*prompt, *result.tokens]])
            logprobs = trained(tokens, use_cache=False).logits[0, :-1].log_softmax(-1)
            chosen = logprobs.gather(1, tokens[0, 1:, None])[len(prompt) - 1 :]
            losses.append((mean - reward) * chosen.sum() / len(results))
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
        for copy in (sampling, scoring):
            copy.load_state_dict(trained.state_dict())
        print(f"step {step}: reward {mean:.3f}, sampler and scorer differ by {difference}")
        assert difference == 0


if __name__ == "__main__":
    main()
