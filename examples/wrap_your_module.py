"""Captured graphs for a module that is not attention: a text classifier over batches of any size.

    python examples/wrap_your_module.py [--backend eager]

Four steps: look for graph breaks, choose buckets, warm up, serve padded inputs.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor, nn

from graphs import Bucket, WarmupManager, explain, exponential, no_compile, progress_for


class Classifier(nn.Module):
    """Averages the embeddings of each row's real tokens and classifies them.

    Shape:
        - forward(tokens ``[rows, length]`` int64, lengths ``[rows]`` int64) -> ``[rows, 4]``
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        self.head = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 4))

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        real = torch.arange(tokens.shape[1]) < lengths.unsqueeze(1)
        summed = (self.embed(tokens) * real.unsqueeze(-1)).sum(1)
        return self.head(summed / lengths.clamp_min(1).unsqueeze(1))


def example_inputs(bucket: Bucket) -> tuple[Tensor, Tensor]:
    """Example inputs of a bucket: padding alone."""
    return (
        torch.zeros(bucket.rows, bucket.length, dtype=torch.int64),
        torch.zeros(bucket.rows, dtype=torch.int64),
    )


def padded(texts: list[Tensor], bucket: Bucket) -> tuple[Tensor, Tensor]:
    """Pads texts to a bucket."""
    tokens, lengths = example_inputs(bucket)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
        lengths[row] = len(text)
    return tokens, lengths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="inductor")
    options = parser.parse_args()
    torch.manual_seed(0)
    module = Classifier().eval().requires_grad_(False)

    found = explain(module, *example_inputs(Bucket(rows=2, length=8)))
    print(f"{len(found.graphs)} graph, {len(found.breaks)} breaks")

    buckets = exponential(rows=(1, 8, 2), length=(16, 64, 3))
    manager = WarmupManager(module, buckets, example_inputs, backend=options.backend)
    print(manager.warmup(progress_for(sys.stderr)))

    with no_compile() as sentinel:
        for size in (1, 3, 8):
            texts = [torch.randint(1000, (5 + 7 * row,)) for row in range(size)]
            bucket = manager.bucket(rows=size, length=max(map(len, texts)))
            logits = manager.run(bucket, *padded(texts, bucket))[:size]
            alone = torch.stack([module(t.unsqueeze(0), torch.tensor([len(t)]))[0] for t in texts])
            torch.testing.assert_close(logits, alone)
            print(f"{size} texts ran in bucket {bucket}")
    print(f"{sentinel.compiles} compiles while serving")


if __name__ == "__main__":
    main()
