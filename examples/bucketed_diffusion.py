"""A diffusion pipeline with `graphs.bucketed`: a few image sizes, any number of images.

    python examples/bucketed_diffusion.py [--store DIR] [--backend eager]

A UNet mixes neighboring pixels, so height and width are exact: only their buckets are served. The
batch is padded. The pipeline is not changed, only its attribute `unet`, as with one of diffusers.
With `--store` the second start loads its graphs.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphs
from graphs.store import ArtifactStore, StoredInductor


@dataclass
class UNetOutput:
    """As of diffusers; torch has to know the class."""

    sample: Tensor


torch.export.register_dataclass(UNetOutput)


class Block(nn.Module):
    """A convolution, and attention to the text."""

    def __init__(self, inputs: int, outputs: int, text: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(32, outputs)
        self.query, self.key, self.value = (
            nn.Linear(size, outputs) for size in (outputs, text, text)
        )

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        x = self.conv(F.silu(self.norm(x))) + self.time(time)[..., None, None]
        pixels = x.flatten(2).transpose(1, 2)
        seen = F.scaled_dot_product_attention(self.query(pixels), self.key(text), self.value(text))
        return x + seen.transpose(1, 2).reshape(x.shape)


class UNet(nn.Module):
    """Two levels with a skip connection.

    Shape:
        - forward(sample ``[batch, 4, height, width]``, timestep ``[]``, text ``[batch, 7, 24]``)
    """

    def __init__(self, width: int = 16, text: int = 24) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, width, 3, padding=1)
        self.above = Block(width, width, text)
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.below = Block(width, 2 * width, text)
        self.up = nn.Conv2d(2 * width, width, 3, padding=1)
        self.joined = Block(2 * width, width, text)
        self.last = nn.Conv2d(width, 4, 3, padding=1)

    def forward(
        self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor
    ) -> UNetOutput:
        text = encoder_hidden_states
        angles = timestep * torch.logspace(0, -4, 16)
        time = torch.cat([angles.sin(), angles.cos()]).unsqueeze(0)
        skip = self.above(self.first(sample), time, text)
        x = self.below(self.down(skip), time, text)
        x = self.up(F.interpolate(x, size=skip.shape[2:]))
        return UNetOutput(self.last(self.joined(torch.cat([x, skip], 1), time, text)))


class Pipeline:
    """Denoises with classifier-free guidance."""

    def __init__(self, unet: nn.Module) -> None:
        self.unet = unet

    def __call__(self, text: Tensor, height: int, width: int, steps: int = 3) -> Tensor:
        draw = torch.Generator().manual_seed(0)
        images = torch.randn(len(text), 4, height, width, generator=draw)
        both = torch.cat([torch.zeros_like(text), text])
        for step in range(steps, 0, -1):
            time = torch.tensor(1000.0 * step / steps)
            pairs = torch.cat([images, images])
            noise = self.unet(pairs, timestep=time, encoder_hidden_states=both).sample
            without, towards = noise.chunk(2)
            images = images - (without + 3 * (towards - without)) / steps
        return images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--store", help="folder for compiled graphs")
    options = parser.parse_args()
    backend = StoredInductor(ArtifactStore(options.store)) if options.store else options.backend
    torch.manual_seed(0)
    pipe = Pipeline(UNet().eval().requires_grad_(False))
    requests = [(count, *size) for count in (1, 2, 3) for size in ((16, 16), (16, 24), (24, 16))]
    texts = [torch.randn(count, 7, 24) for count, _, _ in requests]
    with torch.no_grad():
        expected = [pipe(text, *size) for text, (_, *size) in zip(texts, requests, strict=True)]

    pipe.unet = graphs.bucketed(
        pipe.unet,
        (torch.randn(2, 4, 16, 24), torch.tensor(1.0), torch.randn(2, 7, 24)),
        axes={"sample": ("batch", None, "height", "width"), "encoder_hidden_states": ("batch",)},
        batch=(2, 6),
        height=[16, 24],
        width=[16, 24],
        exact=("height", "width"),
        backend=backend,
    )
    report = pipe.unet.warmup()
    print(f"start: {report.elapsed_seconds:.1f} s, {report.compiles} compiles, {report}")

    with graphs.no_compile() as sentinel, torch.no_grad():
        for text, whole, (count, *size) in zip(texts, expected, requests, strict=True):
            torch.testing.assert_close(pipe(text, *size), whole, rtol=1e-3, atol=1e-3)
            print(f"{count} images of {size[0]} x {size[1]}")
    print(f"{sentinel.compiles} compiles while serving")


if __name__ == "__main__":
    main()
