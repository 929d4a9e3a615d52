"""Warm up a module of your own from a bucket file, serve, and write a report.

    python examples/warmup_your_module.py [--buckets FILE] [--backend eager] [--report DIR]

The module is a denoiser of audio: convolutions over clips of any number and length. Copy the file,
put your module in its place, and change `example_inputs`. The same file also works from the shell:

    python -m graphs explain examples/warmup_your_module.py:Denoiser --bucket clips=2,frames=400
    python -m graphs warmup examples/warmup_your_module.py:Denoiser \
        --buckets examples/warmup_your_module.txt --report report
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from graphs import Bucket, WarmupManager, from_file, no_compile, progress_for
from graphs.report import describe, write_report

BUCKETS = Path(__file__).with_suffix(".txt")


class Denoiser(nn.Module):
    """Subtracts the noise that a small convolutional network predicts.

    Shape:
        - forward(audio ``[clips, frames]`` float32) -> ``[clips, frames]``
    """

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.noise = nn.Sequential(
            nn.Conv1d(1, channels, 9, padding=4),
            nn.GELU(),
            nn.Conv1d(channels, channels, 9, padding=4),
            nn.GELU(),
            nn.Conv1d(channels, 1, 9, padding=4),
        )

    def forward(self, audio: Tensor) -> Tensor:
        return audio - self.noise(audio.unsqueeze(1)).squeeze(1)


def example_inputs(bucket: Bucket) -> tuple[Tensor]:
    """Example inputs of a bucket: silence."""
    return (torch.zeros(bucket.clips, bucket.frames),)


def denoise(manager: WarmupManager, clips: list[Tensor]) -> list[Tensor]:
    """Pad the clips to the cheapest bucket that holds them, run it, and cut the padding off."""
    bucket = manager.bucket(clips=len(clips), frames=max(map(len, clips)))
    (audio,) = example_inputs(bucket)
    for row, clip in zip(audio, clips, strict=False):
        row[: len(clip)] = clip
    cleaned = manager.run(bucket, audio)
    return [row[: len(clip)] for row, clip in zip(cleaned, clips, strict=False)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--buckets", type=Path, default=BUCKETS)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    module = Denoiser().eval().requires_grad_(False)

    buckets = from_file(options.buckets)
    manager = WarmupManager(module, buckets, example_inputs, backend=options.backend)
    report = manager.warmup(progress_for(sys.stderr))
    print(report)
    if len(report.captured) < len(buckets):
        return 1

    with no_compile() as sentinel:
        for lengths in ([90], [300, 20], [310] * 7, [1600, 400, 800]):
            clips = [torch.randn(length) for length in lengths]
            cleaned = denoise(manager, clips)
            for clip, result in zip(clips, cleaned, strict=True):
                # The network looks 12 frames ahead, so the last 12 of a clip see its padding.
                whole = module(clip.unsqueeze(0))[0]
                torch.testing.assert_close(result[:-12], whole[:-12])
            print(f"{len(clips)} clips of up to {max(lengths)} frames denoised")
    print(f"{sentinel.compiles} compiles while serving; never used: {manager.never_hit()}")
    if options.report:
        print(write_report(options.report, describe(manager), title="Denoiser"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
